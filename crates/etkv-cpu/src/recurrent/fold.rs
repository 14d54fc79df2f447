//! Computes the next anchor from an anchor and the rows of a block (a fold).

// An index selects a register. Iterators would hide this.
#![allow(clippy::needless_range_loop)]

use super::exp::exp;
use super::layout::ROWS;
use crate::simd::{Kernel, Simd};

/// Multiplies the keys of a block by the decays from each row to the last: `exp(decays[last] - decays[i])
/// keys[i]`. Also writes the decay from the anchor, `exp(decays[last])`, as an additional row.
pub(super) struct DecayKeys<'a> {
    pub keys: &'a [*const f32; ROWS],
    /// For each row, one number, or one for each channel with `by_channel`.
    pub decays: &'a [*const f32; ROWS],
    pub by_channel: bool,
    /// A multiple of the vector width.
    pub dim: usize,
    /// `ROWS + 1` rows of `dim` numbers.
    pub out: *mut f32,
}

impl Kernel for DecayKeys<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let last = self.decays[ROWS - 1];
        // SAFETY: the fields document the validity of the pointers.
        unsafe {
            for i in 0..=ROWS {
                let mut weight = S::splat(0.0);
                if !self.by_channel {
                    weight = match i {
                        ROWS => exp::<S>(S::splat(*last)),
                        _ => exp::<S>(S::sub(S::splat(*last), S::splat(*self.decays[i]))),
                    };
                }
                let mut c = 0;
                while c < self.dim {
                    if self.by_channel {
                        let last = S::load(last.add(c));
                        weight = match i {
                            ROWS => exp::<S>(last),
                            _ => exp::<S>(S::sub(last, S::load(self.decays[i].add(c)))),
                        };
                    }
                    let out = match i {
                        ROWS => weight,
                        _ => S::mul(S::load(self.keys[i].add(c)), weight),
                    };
                    S::store(self.out.add(i * self.dim + c), out);
                    c += S::WIDTH;
                }
            }
        }
    }
}

/// Computes the next state: `to[c] = keys[ROWS][c] from[c] + sum over i of keys[i][c] updates[i]`, in the
/// order of rows.
pub(super) struct Fold<'a> {
    /// `k_dim` rows, or null if the state is zero.
    pub from: *const f32,
    pub from_stride: usize,
    pub k_dim: usize,
    /// The result of [`DecayKeys`], and its `dim`.
    pub keys: *const f32,
    pub key_stride: usize,
    pub updates: &'a [*const f32; ROWS],
    /// `k_dim` rows of `width` numbers.
    pub to: *mut f32,
    /// A multiple of the vector width.
    pub width: usize,
}

impl Kernel for Fold<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let mut at = 0;
        // SAFETY: the fields document the validity of the pointers, and the blocks cover `width`.
        unsafe {
            while at + S::COLS * S::WIDTH <= self.width {
                match S::COLS {
                    4 => self.block::<S, 4>(at),
                    _ => self.block::<S, 2>(at),
                }
                at += S::COLS * S::WIDTH;
            }
            while at < self.width {
                self.block::<S, 1>(at);
                at += S::WIDTH;
            }
        }
    }
}

impl Fold<'_> {
    /// Computes `C` adjacent vectors from column `at` for all rows.
    #[inline(always)]
    unsafe fn block<S: Simd, const C: usize>(&self, at: usize) {
        let mut c = 0;
        // SAFETY: the caller upholds the contract.
        unsafe {
            while c + 6 <= self.k_dim {
                self.tile::<S, 6, C>(c, at);
                c += 6;
            }
            while c < self.k_dim {
                self.tile::<S, 1, C>(c, at);
                c += 1;
            }
        }
    }

    #[inline(always)]
    unsafe fn tile<S: Simd, const R: usize, const C: usize>(&self, c: usize, at: usize) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            let mut sums = [[S::splat(0.0); C]; R];
            if !self.from.is_null() {
                for r in 0..R {
                    let keep = S::splat(*self.keys.add(ROWS * self.key_stride + c + r));
                    let from = self.from.add((c + r) * self.from_stride + at);
                    for i in 0..C {
                        sums[r][i] = S::mul(keep, S::load(from.add(i * S::WIDTH)));
                    }
                }
            }
            for n in 0..ROWS {
                let row = self.updates[n].add(at);
                let mut update = [S::splat(0.0); C];
                for i in 0..C {
                    update[i] = S::load(row.add(i * S::WIDTH));
                }
                for r in 0..R {
                    let key = S::splat(*self.keys.add(n * self.key_stride + c + r));
                    for i in 0..C {
                        sums[r][i] = S::fma(key, update[i], sums[r][i]);
                    }
                }
            }
            for r in 0..R {
                let to = self.to.add((c + r) * self.width + at);
                for i in 0..C {
                    S::store(to.add(i * S::WIDTH), sums[r][i]);
                }
            }
        }
    }
}
