//! Products with decayed rows, if each channel has a separate decay.
//!
//! The decay from a row to a token is an exponential for each channel, which costs more than the product. So
//! a block is divided into parts of [`PART`] rows. The decay from a row to a token of a later part is split
//! at the end of the row's part: keys are multiplied by the decay up to this end, and vectors by the decay
//! from it. Both results are used in many products. Both decays are at most 1, so the results cannot
//! overflow.

// An index selects a register. Iterators would hide this.
#![allow(clippy::needless_range_loop)]

use super::exp::exp;
use super::layout::ROWS;
use crate::simd::{Kernel, Simd};

/// The rows of a part: a multiple of four.
pub(super) const PART: usize = 16;

/// Multiplies the keys of a part by the decays to its end: `out[i] = exp(end - decays[i]) keys[i]`.
pub(super) struct ToEnd<'a> {
    pub keys: &'a [*const f32],
    /// One for each of `keys`.
    pub decays: &'a [*const f32],
    pub end: *const f32,
    /// A multiple of the vector width.
    pub dim: usize,
    /// A row of `dim` numbers for each key.
    pub out: *mut f32,
}

impl Kernel for ToEnd<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the fields document the validity of the pointers.
        unsafe {
            for i in 0..self.keys.len() {
                let (key, decays) = (*self.keys.get_unchecked(i), *self.decays.get_unchecked(i));
                let mut c = 0;
                while c < self.dim {
                    let left = S::sub(S::load(self.end.add(c)), S::load(decays.add(c)));
                    let key = S::mul(exp::<S>(left), S::load(key.add(c)));
                    S::store(self.out.add(i * self.dim + c), key);
                    c += S::WIDTH;
                }
            }
        }
    }
}

/// Multiplies the `M` vectors of each token by the decays from the end of an earlier part: `exp(decays[n] -
/// end)`.
pub(super) struct FromEnd<'a, const M: usize> {
    /// `M` contiguous vectors of `dim` numbers for each token.
    pub vectors: *const f32,
    /// The decays of the tokens.
    pub decays: &'a [*const f32],
    pub end: *const f32,
    /// A multiple of the vector width.
    pub dim: usize,
    /// The results, in the layout of `vectors`.
    pub out: *mut f32,
}

impl<const M: usize> Kernel for FromEnd<'_, M> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the fields document the validity of the pointers.
        unsafe {
            for n in 0..self.decays.len() {
                let decays = *self.decays.get_unchecked(n);
                let mut c = 0;
                while c < self.dim {
                    let gone = S::sub(S::load(decays.add(c)), S::load(self.end.add(c)));
                    let factor = exp::<S>(gone);
                    for m in 0..M {
                        let at = (n * M + m) * self.dim + c;
                        let vector = S::load(self.vectors.add(at));
                        S::store(self.out.add(at), S::mul(vector, factor));
                    }
                    c += S::WIDTH;
                }
            }
        }
    }
}

/// Multiplies a token's `M` vectors by rows of the same part: `out[m][i]` is the sum over channels of
/// `exp(decay - decays[i]) rows[i] vectors[m]`.
pub(super) struct DecayedDots<'a, const M: usize> {
    /// `M` contiguous vectors of `dim` numbers.
    pub vectors: *const f32,
    pub decay: *const f32,
    /// One for each of `rows`, and at least one.
    pub decays: &'a [*const f32],
    pub rows: &'a [*const f32],
    /// A multiple of the vector width.
    pub dim: usize,
    /// `M` rows of [`ROWS`] numbers. The count of written numbers in a row is rounded up to a multiple of
    /// four.
    pub out: *mut f32,
}

impl<const M: usize> Kernel for DecayedDots<'_, M> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let last = self.rows.len() - 1;
        let mut first = 0;
        // SAFETY: the fields document the validity of the pointers.
        unsafe {
            while first <= last {
                let mut sums = [[S::splat(0.0); 4]; M];
                for i in 0..4 {
                    let row = *self.rows.get_unchecked(last.min(first + i));
                    let decays = *self.decays.get_unchecked(last.min(first + i));
                    let mut c = 0;
                    while c < self.dim {
                        let left = S::sub(S::load(self.decay.add(c)), S::load(decays.add(c)));
                        let key = S::mul(exp::<S>(left), S::load(row.add(c)));
                        for m in 0..M {
                            let vector = S::load(self.vectors.add(m * self.dim + c));
                            sums[m][i] = S::fma(vector, key, sums[m][i]);
                        }
                        c += S::WIDTH;
                    }
                }
                for m in 0..M {
                    S::sums(sums[m], self.out.add(m * ROWS + first));
                }
                first += 4;
            }
        }
    }
}
