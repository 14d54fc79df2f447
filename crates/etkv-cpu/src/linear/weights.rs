//! The memory layout of packed weights.

use etkv_core::{fail, Result};

use super::scales::Scales;
pub use super::scales::ROWS;

/// The maximum number of elements of a row, and the maximum number of rows. No model has that many, and with
/// this limit sizes in bytes fit 64 bits.
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
    /// The same with floats of 4 bits (E2M1), and scales in bfloat16. A weight is its scale times twice the float.
    Fp4 {
        /// The size of a group, a multiple of 32.
        group: usize,
    },
}

/// The codes of weights in groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codes {
    Int8,
    Int4,
    Fp4,
}

/// Twice the values of E2M1 plus [`Codes::zero`], in the order of codes. The highest of four bits is the sign.
pub(crate) const FP4: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

impl Codes {
    /// Returns the bits of a code.
    pub fn bits(self) -> usize {
        match self {
            Self::Int8 => 8,
            Self::Int4 | Self::Fp4 => 4,
        }
    }

    /// Returns the unsigned number that a code stands for.
    pub fn number(self, code: u8) -> u8 {
        match self {
            Self::Int8 | Self::Int4 => code,
            Self::Fp4 => FP4[usize::from(code)],
        }
    }

    /// Returns the number that stands for zero in formats without biases.
    pub fn zero(self) -> u8 {
        match self {
            Self::Int8 => 128,
            Self::Int4 => 8,
            Self::Fp4 => 12,
        }
    }
}

impl WeightFormat {
    /// Returns the codes, the size of the groups and the type of the scales, or `None` for floats.
    pub(crate) fn in_groups(self) -> Option<(Codes, usize, Scales)> {
        match self {
            Self::F32 | Self::Bf16 => None,
            Self::Int8 { group, scales } => Some((Codes::Int8, group, scales)),
            Self::Int4 { group, scales } => Some((Codes::Int4, group, scales)),
            Self::Fp4 { group } => Some((Codes::Fp4, group, Scales::Bf16)),
        }
    }

    /// Returns the size of the groups, or `None` for floats.
    pub fn group(self) -> Option<usize> {
        self.in_groups().map(|(_, group, _)| group)
    }

    /// Returns the unit of columns: the number of columns of a row must be a multiple of it.
    pub(crate) fn unit(self) -> usize {
        self.in_groups().map_or(1, |(_, group, scales)| group * scales.shared().0)
    }

    /// Returns the bytes of a tile whose rows have `columns` elements.
    pub fn tile_size(self, columns: usize) -> usize {
        let Some((codes, group, scales)) = self.in_groups() else {
            return ROWS * columns * if self == Self::F32 { 4 } else { 2 };
        };
        let (sharing, factors) = scales.shared();
        let of_group = scales.size() + ROWS * group * codes.bits() / 8;
        columns / (sharing * group) * (factors + sharing * of_group)
    }

    /// Returns the alignment that the kernels need.
    pub fn alignment(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::Int8 { .. } | Self::Int4 { .. } | Self::Fp4 { .. } => 1,
        }
    }
}

/// Checks that a size is from 1 to `most`.
///
/// # Errors
/// [`Program`](etkv_core::Status::Program).
pub(crate) fn check_size(name: &str, size: usize, most: usize) -> Result<()> {
    if !(1..=most).contains(&size) {
        fail!(Program, "{name}: expected 1 to {most}, got {size}");
    }
    Ok(())
}

/// Checks the sizes of a call's arguments, each with its name, the expected size and the found one.
///
/// # Errors
/// [`Shape`](etkv_core::Status::Shape).
pub(crate) fn check_sizes(sizes: &[(&str, usize, usize)]) -> Result<()> {
    for (name, expected, found) in sizes {
        if expected != found {
            fail!(Shape, "{name}: expected {expected} numbers or bytes, got {found}");
        }
    }
    Ok(())
}

/// Checks that weights in `format` can have rows of this width.
///
/// # Errors
/// [`Program`](etkv_core::Status::Program).
pub(crate) fn check_width(width: usize, format: WeightFormat) -> Result<()> {
    check_size("width of rows", width, MAX_SIZE)?;
    let Some((_, group, scales)) = format.in_groups() else {
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
