//! The memory layout of packed weights.

use etkv_core::{fail, Result};
use half::{bf16, f16};

/// The maximum number of elements of a row, and of rows. It exceeds that of any model, and sizes in bytes fit
/// 64 bits.
pub(crate) const MAX_SIZE: usize = 1 << 24;

/// The number of rows of a tile of weights.
pub const ROWS: usize = 16;

/// The maximum size of a group of weights that share a scale.
pub const MAX_GROUP: usize = 256;

/// The storage format of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightFormat {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// Integers of 8 bits. Each group of a row's weights has a scale. Inputs of products are rounded to 8
    /// bits, in groups of the same size.
    Int8 {
        /// The size of a group, a multiple of 32.
        group: usize,
        /// The type of the scales.
        scales: Scales,
    },
    /// The same with integers of 4 bits.
    Int4 {
        /// The size of a group, a multiple of 32.
        group: usize,
        /// The type of the scales.
        scales: Scales,
    },
}

/// The type of the scales of a tile. Each group has a scale for each row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scales {
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// IEEE binary32.
    F32,
}

impl Scales {
    /// Returns the bytes of the scales before the codes of a group.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2 * ROWS,
            Self::F32 => 4 * ROWS,
        }
    }

    /// Returns the scale of row `row` in a tile. `group` has the bytes of the group.
    pub(crate) fn of_row(self, group: &[u8], row: usize) -> f32 {
        let half = || [group[2 * row], group[2 * row + 1]];
        match self {
            Self::Bf16 => bf16::from_le_bytes(half()).to_f32_const(),
            Self::F16 => f16::from_le_bytes(half()).to_f32_const(),
            Self::F32 => {
                let [a, b] = [4 * row, 4 * row + 2].map(|at| [group[at], group[at + 1]]);
                f32::from_le_bytes([a[0], a[1], b[0], b[1]])
            }
        }
    }
}

impl WeightFormat {
    /// Returns the size of the groups, or `None` for floats.
    pub fn group(self) -> Option<usize> {
        match self {
            Self::F32 | Self::Bf16 => None,
            Self::Int8 { group, .. } | Self::Int4 { group, .. } => Some(group),
        }
    }

    /// Returns the bytes of a tile whose rows have `columns` elements.
    pub fn tile_size(self, columns: usize) -> usize {
        match self {
            Self::F32 => 4 * ROWS * columns,
            Self::Bf16 => 2 * ROWS * columns,
            Self::Int8 { group, scales } => columns / group * (scales.size() + ROWS * group),
            Self::Int4 { group, scales } => columns / group * (scales.size() + ROWS * group / 2),
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

/// Checks that weights in `format` can have rows of this width.
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
