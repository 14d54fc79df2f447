//! The memory layout of packed weights.

use etkv_core::{fail, Result};

use super::scales::Scales;
pub use super::scales::ROWS;

/// The maximum number of elements of a row, and of rows. No model has that many, and with this limit sizes in
/// bytes fit 64 bits.
pub(crate) const MAX_SIZE: usize = 1 << 24;

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

impl WeightFormat {
    /// Returns the size of the groups, or `None` for floats.
    pub fn group(self) -> Option<usize> {
        match self {
            Self::F32 | Self::Bf16 => None,
            Self::Int8 { group, .. } | Self::Int4 { group, .. } => Some(group),
        }
    }

    /// Returns the unit of columns: the number of columns of a row must be a multiple of it.
    pub(crate) fn unit(self) -> usize {
        match self {
            Self::F32 | Self::Bf16 => 1,
            Self::Int8 { group, scales } | Self::Int4 { group, scales } => {
                group * scales.shared().0
            }
        }
    }

    /// Returns the bytes of a tile whose rows have `columns` elements.
    pub fn tile_size(self, columns: usize) -> usize {
        match self {
            Self::F32 => 4 * ROWS * columns,
            Self::Bf16 => 2 * ROWS * columns,
            Self::Int8 { group, scales } => in_groups(columns, group, scales, ROWS * group),
            Self::Int4 { group, scales } => in_groups(columns, group, scales, ROWS * group / 2),
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

/// Returns the bytes of a tile. The codes of a group have `codes` bytes.
fn in_groups(columns: usize, group: usize, scales: Scales, codes: usize) -> usize {
    let (sharing, factors) = scales.shared();
    columns / (sharing * group) * (factors + sharing * (scales.size() + codes))
}

/// Checks that weights in `format` can have rows of this width.
///
/// # Errors
/// [`Program`](etkv_core::Status::Program).
pub(crate) fn check_width(width: usize, format: WeightFormat) -> Result<()> {
    if !(1..=MAX_SIZE).contains(&width) {
        fail!(Program, "width of rows: expected 1 to {MAX_SIZE}, got {width}");
    }
    let (WeightFormat::Int8 { group, scales } | WeightFormat::Int4 { group, scales }) = format
    else {
        return Ok(());
    };
    if group == 0 || group % 32 != 0 || group > MAX_GROUP {
        fail!(Program, "group size: expected a multiple of 32 up to {MAX_GROUP}, got {group}");
    }
    if !width.is_multiple_of(group) {
        fail!(Program, "group size {group} does not divide rows of {width}");
    }
    if !width.is_multiple_of(format.unit()) {
        let (sharing, _) = scales.shared();
        fail!(Program, "groups of a row: expected a multiple of {sharing}, got {}", width / group);
    }
    Ok(())
}
