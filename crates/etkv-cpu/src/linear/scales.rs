//! The numbers that turn the codes of a group into weights.

use super::weights::ROWS;
use crate::simd::{Portable, Simd};

/// How the scales of a tile are stored, one for each row of a group, and its biases.
///
/// A weight without a bias is its scale times (code - code of zero). A weight with a bias is its scale times its code,
/// rounded to float32, plus the bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scales {
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// IEEE binary32.
    F32,
    /// bfloat16. Biases follow the scales.
    Bf16Biased,
    /// IEEE binary16. Biases follow the scales.
    F16Biased,
    /// IEEE binary32. Biases follow the scales.
    F32Biased,
    /// Bytes, and for [`NESTED`] groups a factor of theirs in IEEE binary16. Biases and their factors follow the
    /// scales and their factors. These are the numbers of GGUF's `Q4_K`.
    Nested,
}

/// The groups that share the factors of [`Scales::Nested`].
pub const NESTED: usize = 8;

impl Scales {
    /// Returns the bytes before the codes of a group.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 | Self::Nested => 2 * ROWS,
            Self::F32 | Self::Bf16Biased | Self::F16Biased => 4 * ROWS,
            Self::F32Biased => 8 * ROWS,
        }
    }

    /// Returns the number of adjacent groups that share factors, and the bytes of the factors, which are before them.
    pub(crate) fn shared(self) -> (usize, usize) {
        match self {
            Self::Nested => (NESTED, 4 * ROWS),
            _ => (1, 0),
        }
    }

    /// Returns whether weights have biases.
    pub(crate) fn are_biased(self) -> bool {
        matches!(self, Self::Bf16Biased | Self::F16Biased | Self::F32Biased | Self::Nested)
    }

    /// Returns the scales and the biases of `S::WIDTH` rows of a group, from row `first` on. `factors` are those that
    /// the group shares.
    ///
    /// # Safety
    /// The machine has the instructions of `S`, and the rows are in the memory of a group and of its factors.
    #[inline(always)]
    pub(crate) unsafe fn load<S: Simd>(
        self,
        group: *const u8,
        factors: *const u8,
        first: usize,
    ) -> (S::F, S::F) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            let halves = |from: *const u8, of: usize| S::f16(from.add(2 * (of * ROWS + first)));
            let bytes = |of: usize| S::integers::<8>(group.add(of * ROWS + first));
            // A number plus this is itself, also if it is -0.0.
            let none = S::splat(-0.0);
            match self {
                Self::Bf16 => (S::bf16(group.add(2 * first)), none),
                Self::F16 => (halves(group, 0), none),
                Self::F32 => (S::load(group.cast::<f32>().add(first)), none),
                Self::Bf16Biased => {
                    (S::bf16(group.add(2 * first)), S::bf16(group.add(2 * (ROWS + first))))
                }
                Self::F16Biased => (halves(group, 0), halves(group, 1)),
                Self::F32Biased => {
                    let biases = S::load(group.cast::<f32>().add(ROWS + first));
                    (S::load(group.cast::<f32>().add(first)), biases)
                }
                Self::Nested => {
                    let biases = S::mul(halves(factors, 1), bytes(1));
                    (S::mul(halves(factors, 0), bytes(0)), biases)
                }
            }
        }
    }

    /// Returns the scales and the biases of a group, as [`load`](Self::load).
    ///
    /// # Safety
    /// The memory is that of a group and of its factors.
    pub(crate) unsafe fn all(self, group: *const u8, factors: *const u8) -> [[f32; ROWS]; 2] {
        let mut made = [[0.0; ROWS]; 2];
        for first in (0..ROWS).step_by(Portable::WIDTH) {
            // SAFETY: the caller upholds the contract, and any machine has the instructions.
            let (scales, biases) = unsafe { self.load::<Portable>(group, factors, first) };
            made[0][first..][..Portable::WIDTH].copy_from_slice(&scales);
            made[1][first..][..Portable::WIDTH].copy_from_slice(&biases);
        }
        made
    }
}
