//! Scales and biases, which convert the codes of a group to weights.

use crate::simd::{Portable, Simd};

/// The number of rows of a tile of weights.
pub const ROWS: usize = 16;

/// The type of the scales and biases of a tile. Each group has one for each row.
///
/// Without biases, a weight is `scale * (code - code of zero)`. With biases, it is `scale * code + bias`,
/// where the product is rounded to float32.
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
    /// Bytes that are multiplied by a factor, as in GGUF's `Q4_K`. Eight groups share a factor in IEEE
    /// binary16 for each row. Biases follow the scales, and have separate factors, which follow the factors
    /// of the scales.
    Nested,
}

/// The number of groups that share factors in [`Scales::Nested`].
pub const NESTED: usize = 8;

impl Scales {
    /// Returns the bytes of a group's scales and biases, which precede its codes.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 | Self::Nested => 2 * ROWS,
            Self::F32 | Self::Bf16Biased | Self::F16Biased => 4 * ROWS,
            Self::F32Biased => 8 * ROWS,
        }
    }

    /// Returns the number of adjacent groups that share factors, and the bytes of the factors, which precede
    /// these groups.
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

    /// Returns the scales and the biases of `S::WIDTH` rows of a group, from row `first` on. `factors` points
    /// to the shared factors of the group.
    ///
    /// # Safety
    /// The machine must have the instructions of `S`, and the pointers must be valid for the rows of a group
    /// and of its factors.
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
            // Adding -0.0 changes no number, not even -0.0.
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

    /// The same as [`load`](Self::load) for all rows of a group.
    ///
    /// # Safety
    /// The pointers must be valid for a group and its factors.
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
