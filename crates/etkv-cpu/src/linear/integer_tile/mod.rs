//! A tile of weights in 8 or 4 bits, times a block of rows of inputs in 8 bits.
//!
//! The products of a group are summed in 32-bit integers, without rounding. A group's sum times its two scales
//! is added in float32, in the order of the groups.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use super::weights::Scales;
use crate::simd::Instructions;

/// The instructions of a product of integers.
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
    /// Returns the best ones of a machine with these instructions.
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

    /// Returns the most rows of a block.
    pub fn most(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => super::blocks::BLOCK,
            _ => 4,
        }
    }
}

/// The products of a tile's rows and the rows of a block, `[n, 16]`.
pub(crate) struct IntegerTile {
    /// For each group the scales of its rows, and its codes.
    pub weights: *const u8,
    /// Whether weights have 4 bits, or 8.
    pub is_int4: bool,
    /// How the scales of weights are stored.
    pub stored: Scales,
    pub n_groups: usize,
    /// The columns of a group, a multiple of 32.
    pub group: usize,
    /// `[columns / 4, n, 4]`, from -127 to 127.
    pub inputs: *const i8,
    /// `[groups, n]`.
    pub scales: *const f32,
    /// `[groups, n]`, what the products of a group begin with: codes of weights have no sign, so this is minus the sum
    /// of the inputs times the code of zero.
    pub starts: *const i32,
    pub n: usize,
    pub out: *mut f32,
}

impl IntegerTile {
    /// Computes the products.
    ///
    /// # Safety
    /// The machine has the instructions, the pointers have what the comments say, and `n` is at most
    /// [`Dot::most`].
    pub unsafe fn run(&self, dot: Dot) {
        // SAFETY: the caller's.
        unsafe {
            match (dot, self.is_int4) {
                #[cfg(target_arch = "x86_64")]
                (Dot::Avx512Vnni, true) => avx512::run::<true>(self),
                #[cfg(target_arch = "x86_64")]
                (Dot::Avx512Vnni, false) => avx512::run::<false>(self),
                #[cfg(target_arch = "x86_64")]
                (Dot::Avx2, true) => avx2::run::<true>(self),
                #[cfg(target_arch = "x86_64")]
                (Dot::Avx2, false) => avx2::run::<false>(self),
                #[cfg(target_arch = "aarch64")]
                (Dot::Neon, true) => neon::run::<true>(self),
                #[cfg(target_arch = "aarch64")]
                (Dot::Neon, false) => neon::run::<false>(self),
                (Dot::Portable, _) => portable::run(self),
            }
        }
    }
}
