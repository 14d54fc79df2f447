//! The loops over the tokens of a block. Each is written once, and generic over instruction sets.
//!
//! Each element of a result is computed by the same sequence of operations, independent of the number of rows
//! and columns that a loop processes at a time.

// An index selects a register. Iterators would hide this.
#![allow(clippy::needless_range_loop)]

use super::exp::exp;
use super::layout::ROWS;
use crate::simd::{Kernel, Simd};

/// Multiplies the `M` vectors of each token by rows: `out[v][i] = vectors[v] . rows[i]`.
pub(super) struct Dots<'a, const M: usize> {
    /// `M` contiguous vectors of `dim` numbers for each token.
    pub vectors: *const f32,
    pub n_tokens: usize,
    /// Rows of `dim` numbers.
    pub rows: &'a [*const f32],
    /// Whether the last rows are those of the tokens. Products with rows after a token's own row are then not
    /// needed.
    pub causal: bool,
    /// A multiple of the vector width.
    pub dim: usize,
    /// [`ROWS`] numbers for each vector. The count of written numbers is rounded up to a multiple of four,
    /// and may include rows after the token's own.
    pub out: *mut f32,
}

impl<const M: usize> Kernel for Dots<'_, M> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let mut at = 0;
        // SAFETY: the fields document the validity of the pointers.
        unsafe {
            let count = M * self.n_tokens;
            while S::ROWS >= 4 && at + 4 <= count {
                self.some::<S, 4>(at);
                at += 4;
            }
            while at + 2 <= count {
                self.some::<S, 2>(at);
                at += 2;
            }
            while at < count {
                self.some::<S, 1>(at);
                at += 1;
            }
        }
    }
}

impl<const M: usize> Dots<'_, M> {
    /// Multiplies `R` vectors from vector `at` on.
    #[inline(always)]
    unsafe fn some<S: Simd, const R: usize>(&self, at: usize) {
        let last = match self.causal {
            true => self.rows.len() - self.n_tokens + (at + R - 1) / M,
            false => self.rows.len() - 1,
        };
        let mut first = 0;
        // SAFETY: the caller upholds the contract.
        unsafe {
            let vectors = self.vectors.add(at * self.dim);
            while first <= last {
                // The last row is repeated in place of missing rows.
                let mut rows = [*self.rows.get_unchecked(last); 4];
                for i in 0..4 {
                    rows[i] = *self.rows.get_unchecked(last.min(first + i));
                }
                let mut sums = [[S::splat(0.0); 4]; R];
                let mut c = 0;
                while c < self.dim {
                    let mut keys = [S::splat(0.0); 4];
                    for i in 0..4 {
                        keys[i] = S::load(rows[i].add(c));
                    }
                    for r in 0..R {
                        let vector = S::load(vectors.add(r * self.dim + c));
                        for i in 0..4 {
                            sums[r][i] = S::fma(vector, keys[i], sums[r][i]);
                        }
                    }
                    c += S::WIDTH;
                }
                for r in 0..R {
                    S::sums(sums[r], self.out.add((at + r) * ROWS + first));
                }
                first += 4;
            }
        }
    }
}

/// Multiplies the products of a token by the decays from each row to the token, `exp(decay - decays[i])`.
pub(super) struct Weigh<'a, const M: usize> {
    /// `M` rows of [`ROWS`] numbers.
    pub products: *mut f32,
    pub decay: f32,
    pub decays: &'a [f32; ROWS],
    /// The count of numbers in a row that must be multiplied. More may be multiplied.
    pub count: usize,
}

impl<const M: usize> Kernel for Weigh<'_, M> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the fields document the validity of the pointers, and the vector width divides `ROWS`.
        unsafe {
            let decay = S::splat(self.decay);
            let mut i = 0;
            while i < self.count {
                let weight = exp::<S>(S::sub(decay, S::load(self.decays.as_ptr().add(i))));
                for m in 0..M {
                    let product = self.products.add(m * ROWS + i);
                    S::store(product, S::mul(S::load(product), weight));
                }
                i += S::WIDTH;
            }
        }
    }
}

/// Multiplies the `M` vectors of a token by its decay from the anchor, `exp(decay)`, in place.
pub(super) struct Decay<const M: usize> {
    /// `M` contiguous vectors.
    pub vectors: *mut f32,
    /// A multiple of the vector width.
    pub dim: usize,
    /// One number, or one for each channel with `by_channel`.
    pub decay: *const f32,
    pub by_channel: bool,
}

impl<const M: usize> Kernel for Decay<M> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the fields document the validity of the pointers.
        unsafe {
            let mut factor = S::splat(0.0);
            if !self.by_channel {
                factor = exp::<S>(S::splat(*self.decay));
            }
            let mut c = 0;
            while c < self.dim {
                if self.by_channel {
                    factor = exp::<S>(S::load(self.decay.add(c)));
                }
                for m in 0..M {
                    let vector = self.vectors.add(m * self.dim + c);
                    S::store(vector, S::mul(S::load(vector), factor));
                }
                c += S::WIDTH;
            }
        }
    }
}

/// Computes updates and outputs of consecutive tokens, for some columns of the values.
///
/// With the delta rule, a token has `M = 2` vectors: its decayed key and its decayed query. Without it, `M =
/// 1`: the query. The result of a vector is the sum of the state's rows, weighted by the vector's numbers,
/// plus the sum of the block's updates, weighted by the vector's weights, both in ascending order. The
/// token's update is its value minus the result of its key, times the write strength. The output is the
/// result of the query, including this update.
pub(super) struct Columns<'a, const M: usize> {
    /// The anchor with `k_dim` rows, or null if it is zero.
    pub state: *const f32,
    pub state_stride: usize,
    pub k_dim: usize,
    /// `M` vectors for each token, with a stride of `vector_stride` numbers.
    pub vectors: *const f32,
    pub vector_stride: usize,
    /// `M` rows of [`ROWS`] weights for each token.
    pub weights: *const f32,
    /// The updates of the block's rows before the tokens, from the first column on.
    pub rows: &'a [*const f32],
    /// The tokens' values, from the first column on. They are replaced by the updates.
    pub updates: *mut f32,
    pub update_stride: usize,
    /// The write strength of each token, for the delta rule.
    pub betas: *const f32,
    pub out: *mut f32,
    pub out_stride: usize,
    pub n_tokens: usize,
    /// The number of columns, a multiple of the vector width.
    pub width: usize,
}

impl<const M: usize> Kernel for Columns<'_, M> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let mut at = 0;
        // SAFETY: the fields document the validity of the pointers, and the blocks cover `width`.
        unsafe {
            if self.n_tokens == 1 {
                while at + 2 * S::COLS * S::WIDTH <= self.width {
                    match S::COLS {
                        4 => self.tile::<S, 1, 8>(0, at),
                        _ => self.tile::<S, 1, 4>(0, at),
                    }
                    at += 2 * S::COLS * S::WIDTH;
                }
            }
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

impl<const M: usize> Columns<'_, M> {
    /// Computes `C` adjacent vectors from column `at` for all tokens.
    #[inline(always)]
    unsafe fn block<S: Simd, const C: usize>(&self, at: usize) {
        let mut token = 0;
        // SAFETY: the caller upholds the contract.
        unsafe {
            while M == 1 && token + 6 <= self.n_tokens {
                self.tile::<S, 6, C>(token, at);
                token += 6;
            }
            while token + 3 <= self.n_tokens {
                self.tile::<S, 3, C>(token, at);
                token += 3;
            }
            if token + 2 == self.n_tokens {
                self.tile::<S, 2, C>(token, at);
            } else if token < self.n_tokens {
                self.tile::<S, 1, C>(token, at);
            }
        }
    }

    /// Computes `C` adjacent vectors from column `at` for `R` tokens.
    #[inline(always)]
    unsafe fn tile<S: Simd, const R: usize, const C: usize>(&self, token: usize, at: usize) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            let mut sums = [[[S::splat(0.0); C]; M]; R];
            if !self.state.is_null() {
                let vectors = self.vectors.add(token * M * self.vector_stride);
                let mut row = self.state.add(at);
                for c in 0..self.k_dim {
                    let mut state = [S::splat(0.0); C];
                    for i in 0..C {
                        state[i] = S::load(row.add(i * S::WIDTH));
                    }
                    for r in 0..R {
                        for m in 0..M {
                            let factor = *vectors.add((r * M + m) * self.vector_stride + c);
                            let factor = S::splat(factor);
                            for i in 0..C {
                                sums[r][m][i] = S::fma(factor, state[i], sums[r][m][i]);
                            }
                        }
                    }
                    row = row.wrapping_add(self.state_stride);
                }
            }
            let weights = self.weights.add(token * M * ROWS);
            for (n, row) in self.rows.iter().enumerate() {
                self.add::<S, R, C>(&mut sums, weights.add(n), row.add(at));
            }
            let before = self.rows.len();
            for n in 0..token {
                let row = self.updates.add(n * self.update_stride + at);
                self.add::<S, R, C>(&mut sums, weights.add(before + n), row);
            }
            for r in 0..R {
                let update = self.updates.add((token + r) * self.update_stride + at);
                let mut row = [S::splat(0.0); C];
                for i in 0..C {
                    row[i] = S::load(update.add(i * S::WIDTH));
                    if M == 2 {
                        let beta = S::splat(*self.betas.add(token + r));
                        row[i] = S::mul(beta, S::sub(row[i], sums[r][0][i]));
                        S::store(update.add(i * S::WIDTH), row[i]);
                    }
                }
                for later in r..R {
                    for m in 0..M {
                        // A token's update does not depend on the product of its key with itself.
                        if later == r && m + 1 < M {
                            continue;
                        }
                        let weight = weights.add((later * M + m) * ROWS + before + token + r);
                        let weight = S::splat(*weight);
                        for i in 0..C {
                            sums[later][m][i] = S::fma(weight, row[i], sums[later][m][i]);
                        }
                    }
                }
                let out = self.out.add((token + r) * self.out_stride + at);
                for i in 0..C {
                    S::store(out.add(i * S::WIDTH), sums[r][M - 1][i]);
                }
            }
        }
    }

    /// Adds a row's update, multiplied by each of the weights from `weights` on.
    #[inline(always)]
    unsafe fn add<S: Simd, const R: usize, const C: usize>(
        &self,
        sums: &mut [[[S::F; C]; M]; R],
        weights: *const f32,
        row: *const f32,
    ) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            let mut update = [S::splat(0.0); C];
            for i in 0..C {
                update[i] = S::load(row.add(i * S::WIDTH));
            }
            for r in 0..R {
                for m in 0..M {
                    let weight = S::splat(*weights.add((r * M + m) * ROWS));
                    for i in 0..C {
                        sums[r][m][i] = S::fma(weight, update[i], sums[r][m][i]);
                    }
                }
            }
        }
    }
}
