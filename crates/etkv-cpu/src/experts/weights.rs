//! How the weights of experts lie in memory.

/// The rows of a tile of weights.
pub const ROWS: usize = 16;

/// The bytes of a tile's scales, in bfloat16, for one group.
pub const SCALES: usize = 2 * ROWS;

/// The largest group of weights that share a scale.
pub const MAX_GROUP: usize = 256;

/// How weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightFormat {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// Integers of 8 bits; `group` weights of a row share a scale. Inputs of products are rounded to 8 bits, in
    /// groups of the same size.
    Int8 {
        /// A multiple of 32.
        group: usize,
    },
    /// The same with integers of 4 bits.
    Int4 {
        /// A multiple of 32.
        group: usize,
    },
}

impl WeightFormat {
    /// Returns the size of the groups; `None` for floats.
    pub fn group(self) -> Option<usize> {
        match self {
            Self::F32 | Self::Bf16 => None,
            Self::Int8 { group } | Self::Int4 { group } => Some(group),
        }
    }

    /// Returns the bytes of a tile of rows with `columns` elements.
    pub fn tile_size(self, columns: usize) -> usize {
        match self {
            Self::F32 => 4 * ROWS * columns,
            Self::Bf16 => 2 * ROWS * columns,
            Self::Int8 { group } => columns / group * (SCALES + ROWS * group),
            Self::Int4 { group } => columns / group * (SCALES + ROWS * group / 2),
        }
    }

    /// Returns the alignment that the kernels need.
    pub fn alignment(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::Int8 { .. } | Self::Int4 { .. } => 1,
        }
    }
}
