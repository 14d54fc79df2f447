//! Products with rows whose channels decay each at its own rate.
//!
//! A decay from a row to a token is an exponential for each channel, which costs more than the product. So a
//! block has parts of [`PART`] rows. Between parts a decay goes by way of the end of the row's part: keys decay
//! to it, and vectors from it, and both serve many products. Both decays are at most 1, so neither overflows.

// An index names a register; iterators would hide which.
#![allow(clippy::needless_range_loop)]

use super::exp::exp;
use super::layout::ROWS;
use crate::simd::{Kernel, Simd};

/// The rows of a part: a multiple of four.
pub(super) const PART: usize = 16;

/// Multiplies the keys of a part with the decays to its end: `out[i] = exp(end - decays[i]) keys[i]`.
pub(super) struct ToEnd<'a> {
    pub keys: &'a [*const f32],
    /// As many as `keys`.
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
        // SAFETY: the pointers are as the fields say.
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

/// Multiplies the `M` vectors of each token with its decays from the end of an earlier part: `exp(decays[n] -
/// end)`.
pub(super) struct FromEnd<'a, const M: usize> {
    /// `M` vectors of `dim` numbers for each token, one after another.
    pub vectors: *const f32,
    /// Those of the tokens.
    pub decays: &'a [*const f32],
    pub end: *const f32,
    /// A multiple of the vector width.
    pub dim: usize,
    /// As `vectors`.
    pub out: *mut f32,
}

impl<const M: usize> Kernel for FromEnd<'_, M> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the pointers are as the fields say.
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

/// The products of a token's `M` vectors with rows of the same part: `out[m][i]` is the sum over channels of
/// `exp(decay - decays[i]) rows[i] vectors[m]`.
pub(super) struct DecayedDots<'a, const M: usize> {
    /// `M` vectors of `dim` numbers, one after another.
    pub vectors: *const f32,
    pub decay: *const f32,
    /// As many as `rows`, at least one.
    pub decays: &'a [*const f32],
    pub rows: &'a [*const f32],
    /// A multiple of the vector width.
    pub dim: usize,
    /// `M` rows of [`ROWS`] numbers. Numbers past the rows, up to a multiple of four, are written too.
    pub out: *mut f32,
}

impl<const M: usize> Kernel for DecayedDots<'_, M> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let last = self.rows.len() - 1;
        let mut first = 0;
        // SAFETY: the pointers are as the fields say.
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
