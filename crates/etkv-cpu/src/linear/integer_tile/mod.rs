//! Products of a tile of weights in 8 or 4 bits and a block of input rows in 8 bits.
//!
//! The products of a group are summed in 32-bit integers, without rounding. The sum is multiplied by the
//! scales of weights and inputs, and added in float32, in the order of groups.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use super::scales::Scales;
use super::weights::Codes;
use crate::simd::Instructions;

/// [`Codes`] as a constant that kernels are compiled for.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const INT8: u8 = Codes::Int8 as u8;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const INT4: u8 = Codes::Int4 as u8;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const FP4: u8 = Codes::Fp4 as u8;

/// The instructions of a kernel for products of integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dot {
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
    Portable,
}

impl Dot {
    /// Returns the best kernel for a machine with these instructions.
    pub fn of(instructions: Instructions) -> Self {
        match instructions {
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 if is_x86_feature_detected!("avx512vnni") => Self::Avx512Vnni,
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 | Instructions::Avx2 => Self::Avx2,
            #[cfg(target_arch = "aarch64")]
            Instructions::Neon => Self::Neon,
            Instructions::Portable => Self::Portable,
        }
    }

    /// Returns the maximum number of rows of a block.
    pub fn most(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => super::blocks::BLOCK,
            _ => 4,
        }
    }
}

/// Multiplies the 16 rows of a tile by the `n` rows of a block. The result is `[n, 16]`.
pub(crate) struct IntegerTile {
    /// For each group: the scales of its rows, followed by its codes.
    pub weights: *const u8,
    /// The codes of the weights.
    pub codes: Codes,
    /// The type of the weights' scales and biases.
    pub stored: Scales,
    pub n_groups: usize,
    /// The columns of a group, a multiple of 32.
    pub group: usize,
    /// `[columns / 4, n, 4]`, with values from -127 to 127.
    pub inputs: *const i8,
    /// `[groups, n]`.
    pub scales: *const f32,
    /// `[groups, n]`: the starts of a group's sums. Without biases, a start is minus the sum of the inputs
    /// times the code of zero, because codes of weights are unsigned. With biases, it is the sum of the
    /// inputs, by which the kernel multiplies the biases.
    pub starts: *const i32,
    pub n: usize,
    pub out: *mut f32,
}

impl IntegerTile {
    /// Runs the kernel.
    ///
    /// # Safety
    /// The machine must have the instructions, pointers must be valid as the fields document, and `n` must be
    /// at most [`Dot::most`].
    pub unsafe fn run(&self, dot: Dot) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            match (dot, self.codes) {
                #[cfg(target_arch = "x86_64")]
                (Dot::Avx512Vnni, Codes::Int8) => avx512::run::<INT8>(self),
                #[cfg(target_arch = "x86_64")]
                (Dot::Avx512Vnni, Codes::Int4) => avx512::run::<INT4>(self),
                #[cfg(target_arch = "x86_64")]
                (Dot::Avx512Vnni, Codes::Fp4) => avx512::run::<FP4>(self),
                #[cfg(target_arch = "x86_64")]
                (Dot::Avx2, Codes::Int8) => avx2::run::<INT8>(self),
                #[cfg(target_arch = "x86_64")]
                (Dot::Avx2, Codes::Int4) => avx2::run::<INT4>(self),
                #[cfg(target_arch = "x86_64")]
                (Dot::Avx2, Codes::Fp4) => avx2::run::<FP4>(self),
                #[cfg(target_arch = "aarch64")]
                (Dot::Neon, Codes::Int8) => neon::run::<INT8>(self),
                #[cfg(target_arch = "aarch64")]
                (Dot::Neon, Codes::Int4) => neon::run::<INT4>(self),
                #[cfg(target_arch = "aarch64")]
                (Dot::Neon, Codes::Fp4) => neon::run::<FP4>(self),
                (Dot::Portable, _) => portable::run(self),
            }
        }
    }
}
