//! Products of a tile of weights in float32 or bfloat16 and a block of input rows.

use super::blocks::{with_rows, BLOCK};
use super::weights::ROWS;
use crate::simd::{Kernel, Simd};

/// Multiplies the 16 rows of a tile by the `n` rows of a block. The result is `[n, 16]`. Sums are in
/// ascending order of columns.
pub(crate) struct FloatTile {
    /// `[columns, 16]` in float32, or in bfloat16 with `IS_BF16`.
    pub weights: *const u8,
    pub is_bf16: bool,
    pub columns: usize,
    /// `[columns, n]`.
    pub inputs: *const f32,
    pub n: usize,
    pub out: *mut f32,
}

impl Kernel for FloatTile {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            match self.is_bf16 {
                true => self.of::<S, true>(),
                false => self.of::<S, false>(),
            }
        }
    }
}

impl FloatTile {
    #[inline(always)]
    unsafe fn of<S: Simd, const IS_BF16: bool>(&self) {
        const { assert!(BLOCK == 12) };
        // SAFETY: the caller upholds the contract.
        unsafe {
            match ROWS / S::WIDTH {
                1 => with_rows!(self.n, [1 2 3 4 5 6 7 8 9 10 11] or 12, |N| {
                    self.multiply::<S, IS_BF16, N, 1>()
                }),
                _ => with_rows!(self.n, [1 2 3 4 5] or 6, |N| self.multiply::<S, IS_BF16, N, 2>()),
            }
        }
    }

    /// Multiplies by `N` rows of inputs, with the tile's rows in `V` vectors.
    #[inline(always)]
    unsafe fn multiply<S: Simd, const IS_BF16: bool, const N: usize, const V: usize>(&self) {
        let size = if IS_BF16 { 2 } else { 4 };
        // SAFETY: the caller upholds the contract.
        unsafe {
            let mut sums = [[S::splat(0.0); V]; N];
            let (mut weights, mut inputs) = (self.weights, self.inputs);
            for _ in 0..self.columns {
                for v in 0..V {
                    let from = weights.add(v * S::WIDTH * size);
                    let row = match IS_BF16 {
                        true => S::bf16(from),
                        false => S::load(from.cast()),
                    };
                    for (i, sums) in sums.iter_mut().enumerate() {
                        sums[v] = S::fma(S::splat(*inputs.add(i)), row, sums[v]);
                    }
                }
                weights = weights.add(ROWS * size);
                inputs = inputs.add(N);
            }
            for (i, sums) in sums.iter().enumerate() {
                for (v, &sum) in sums.iter().enumerate() {
                    S::store(self.out.add(i * ROWS + v * S::WIDTH), sum);
                }
            }
        }
    }
}
