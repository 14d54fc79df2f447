//! How packed weights lie in memory.

use etkv_core::{fail, Result};

/// The most elements of a row, and the most rows: more than any model has, and few enough that sizes in bytes
/// fit 64 bits.
pub(crate) const MAX_SIZE: usize = 1 << 24;

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

/// Refuses a width of rows that weights in `format` cannot have.
///
/// # Errors
/// [`Program`](etkv_core::Status::Program).
pub(crate) fn check_width(width: usize, format: WeightFormat) -> Result<()> {
    if !(1..=MAX_SIZE).contains(&width) {
        fail!(Program, "width of rows: expected 1 to {MAX_SIZE}, got {width}");
    }
    let Some(group) = format.group() else {
        return Ok(());
    };
    if group == 0 || group % 32 != 0 || group > MAX_GROUP {
        fail!(Program, "group size: expected a multiple of 32 up to {MAX_GROUP}, got {group}");
    }
    if !width.is_multiple_of(group) {
        fail!(Program, "group size {group} does not divide rows of {width}");
    }
    Ok(())
}
