//! The loops of attention. Each is written once, and generic over instruction sets and formats.
//!
//! A tile is up to [`TILE`] slots of one KV head. For a few query rows, [`Dots`] multiplies the stored keys
//! in place, and [`Product`] the stored values. For many query rows, [`Unpack`] and [`Transpose`] first copy
//! the tile to scratch memory, and both products use [`Product`].

// An index selects a register. Iterators would hide this.
#![allow(clippy::needless_range_loop)]

use super::decode::{Decode, Row};
use crate::simd::{Kernel, Simd};

/// The maximum number of slots that are processed at a time: the bits of a word.
pub(super) const TILE: usize = 64;

/// The bytes of a cache line.
const LINE: usize = 64;

/// Rows of one KV head, addressed by their slots.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a> {
    /// The row of slot 0 in each plane.
    pub first: Row,
    /// The bytes from a slot to the next one in each plane.
    pub strides: [usize; 3],
    /// The slots that are read.
    pub slots: &'a [u32],
}

impl Rows<'_> {
    #[inline(always)]
    unsafe fn row(&self, i: usize) -> Row {
        // SAFETY: the caller ensures that there are more than `i` slots and that the planes have them.
        unsafe {
            let slot = *self.slots.get_unchecked(i) as usize;
            let [a, b, c] = self.first;
            [
                a.wrapping_add(slot * self.strides[0]),
                b.wrapping_add(slot * self.strides[1]),
                c.wrapping_add(slot * self.strides[2]),
            ]
        }
    }
}

/// Rows that the next loop reads. The current loop prefetches them, because they are too far apart for the
/// hardware prefetcher.
#[derive(Debug, Clone, Copy)]
pub(super) struct Next<'a> {
    /// The rows.
    pub rows: Rows<'a>,
    /// The bytes of a row in the first plane. Other planes are small and contiguous, so they are not
    /// prefetched.
    pub bytes: usize,
}

impl<'a> Next<'a> {
    /// Returns the rows that the loop over query rows `at` to `end` of `count` prefetches.
    #[inline(always)]
    pub fn share(mut self, at: usize, end: usize, count: usize) -> Self {
        let slots = self.rows.slots;
        self.rows.slots = &slots[slots.len() * at / count..slots.len() * end / count];
        self
    }

    /// Returns a prefetcher that spreads the rows over `steps` steps.
    #[inline(always)]
    fn in_steps(next: Option<Self>, steps: usize) -> Fetch<'a> {
        let nothing = Rows { first: [std::ptr::null(); 3], strides: [0; 3], slots: &[] };
        let Next { rows, bytes } = next.unwrap_or(Next { rows: nothing, bytes: 0 });
        let lines = bytes.div_ceil(LINE);
        let each = (rows.slots.len() * lines).div_ceil(steps);
        Fetch { rows, lines, each, row: 0, line: std::ptr::null(), left: 0 }
    }
}

/// Prefetches rows, a few cache lines at a time, because many requests at once would stall the processor.
struct Fetch<'a> {
    rows: Rows<'a>,
    /// The cache lines of a row.
    lines: usize,
    /// The cache lines to prefetch in a step.
    each: usize,
    /// The next row.
    row: usize,
    /// The next cache line, and the number of lines left in its row.
    line: *const u8,
    left: usize,
}

impl Fetch<'_> {
    #[inline(always)]
    unsafe fn step(&mut self) {
        for _ in 0..self.each {
            if self.left == 0 {
                if self.row == self.rows.slots.len() {
                    break;
                }
                // SAFETY: the row exists.
                self.line = unsafe { self.rows.row(self.row) }[0];
                self.left = self.lines;
                self.row += 1;
            }
            prefetch(self.line);
            self.line = self.line.wrapping_add(LINE);
            self.left -= 1;
        }
    }
}

#[inline(always)]
fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address has no visible effect, and all x86-64 machines have SSE.
    unsafe {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch of any address has no visible effect.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}

/// The scores of `R` query rows: their products with each stored row.
pub(super) struct Dots<'a, D, const R: usize> {
    pub decode: D,
    /// `R` rows of `dim` numbers.
    pub queries: [*const f32; R],
    pub keys: Rows<'a>,
    /// A multiple of the vector width and of the group.
    pub dim: usize,
    /// `R` contiguous rows of [`TILE`] numbers. The number of written scores is rounded up to a multiple of
    /// four.
    pub scores: *mut f32,
    pub next: Option<Next<'a>>,
}

impl<D: Decode, const R: usize> Kernel for Dots<'_, D, R> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (group, count) = (self.decode.group(self.dim), self.keys.slots.len());
        // SAFETY: the fields document the validity of the pointers.
        unsafe {
            // There are no closures over vectors here: these would become calls, which are not compiled for
            // the instructions of `S`.
            let mut fetch = Next::in_steps(self.next, count.div_ceil(4));
            let mut first = 0;
            while first < count {
                let mut rows = [self.keys.row(first); 4];
                for i in 1..4 {
                    // The last row is repeated in place of missing rows.
                    rows[i] = self.keys.row((first + i).min(count - 1));
                }
                fetch.step();
                let mut sums = [[S::splat(0.0); 4]; R];
                let mut at = 0;
                while at < self.dim {
                    let mut scales = [self.decode.scale::<S>(rows[0], at / group); 4];
                    for i in 1..4 {
                        scales[i] = self.decode.scale::<S>(rows[i], at / group);
                    }
                    let end = at + group;
                    while at < end {
                        let mut keys = [S::splat(0.0); 4];
                        for i in 0..4 {
                            keys[i] = self.decode.load::<S>(rows[i], at, scales[i]);
                        }
                        for r in 0..R {
                            let query = S::load(self.queries[r].add(at));
                            for i in 0..4 {
                                sums[r][i] = S::fma(query, keys[i], sums[r][i]);
                            }
                        }
                        at += S::WIDTH;
                    }
                }
                for (r, sums) in sums.into_iter().enumerate() {
                    S::sums(sums, self.scores.add(r * TILE + first));
                }
                first += 4;
            }
        }
    }
}

/// Adds the product of a matrix with stored rows to `R` rows: `out[r] = out[r] * keep[r] + sum over
/// i of factors[r][i] * row[i]`.
pub(super) struct Product<'a, D, const R: usize> {
    pub decode: D,
    /// `R` rows with a factor for each stored row.
    pub factors: [*const f32; R],
    pub rows: Rows<'a>,
    /// The elements of a stored row: a multiple of the vector width and of the group.
    pub dim: usize,
    /// `R` rows of `dim` numbers, which do not overlap.
    pub out: [*mut f32; R],
    /// If it is 0, `out` is overwritten and may contain NaN before.
    pub keep: [f32; R],
    pub next: Option<Next<'a>>,
}

impl<D: Decode, const R: usize> Kernel for Product<'_, D, R> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let vectors = self.dim / S::WIDTH;
        let blocks = vectors / S::COLS + vectors % S::COLS;
        let mut block = 0;
        // SAFETY: the fields document the validity of the pointers, and the blocks cover `dim`.
        unsafe {
            let mut at = 0;
            while at + S::COLS * S::WIDTH <= self.dim {
                // With `const`, the compiler omits the other branch.
                if const { S::COLS == 4 } {
                    self.block::<S, 4>(at, block, blocks);
                } else {
                    self.block::<S, 2>(at, block, blocks);
                }
                at += S::COLS * S::WIDTH;
                block += 1;
            }
            while at < self.dim {
                self.block::<S, 1>(at, block, blocks);
                at += S::WIDTH;
                block += 1;
            }
        }
    }
}

impl<D: Decode, const R: usize> Product<'_, D, R> {
    /// Computes block number `block` of `blocks`: `C` adjacent vectors from element `at`. Each block
    /// prefetches its share of the next rows.
    #[inline(always)]
    unsafe fn block<S: Simd, const C: usize>(&self, at: usize, block: usize, blocks: usize) {
        let group = self.decode.group(self.dim);
        // SAFETY: the caller upholds the contract.
        unsafe {
            let mut sums = [[S::splat(0.0); C]; R];
            let count = self.rows.slots.len();
            let next = self.next.map(|next| next.share(block, block + 1, blocks));
            let mut fetch = Next::in_steps(next, count);
            for i in 0..count {
                let row = self.rows.row(i);
                fetch.step();
                let mut scale = self.decode.scale::<S>(row, at / group);
                let mut values = [S::splat(0.0); C];
                for (c, value) in values.iter_mut().enumerate() {
                    let at = at + c * S::WIDTH;
                    if c > 0 && at.is_multiple_of(group) {
                        scale = self.decode.scale::<S>(row, at / group);
                    }
                    *value = self.decode.load::<S>(row, at, scale);
                }
                for (sums, factors) in sums.iter_mut().zip(self.factors) {
                    let factor = S::splat(*factors.add(i));
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum = S::fma(factor, value, *sum);
                    }
                }
            }
            for r in 0..R {
                let keep = self.keep[r];
                for (c, &sum) in sums[r].iter().enumerate() {
                    let out = self.out[r].add(at + c * S::WIDTH);
                    let sum = match keep == 0.0 {
                        true => sum,
                        false => S::fma(S::load(out), S::splat(keep), sum),
                    };
                    S::store(out, sum);
                }
            }
        }
    }
}

/// Unpacks stored rows to float32.
pub(super) struct Unpack<'a, D> {
    pub decode: D,
    pub rows: Rows<'a>,
    /// The elements of a row: a multiple of the group, plus less than one vector.
    pub dim: usize,
    /// A row of `padded` numbers for each stored row. Numbers after `dim` are finite if the row is, and are
    /// multiplied by zeros of the queries.
    pub out: *mut f32,
    /// `dim`, rounded up to the vector width.
    pub padded: usize,
}

impl<D: Decode> Kernel for Unpack<'_, D> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let group = self.decode.group(self.dim);
        let whole = self.dim - self.dim % S::WIDTH;
        // SAFETY: the fields document the validity of the pointers.
        unsafe {
            for i in 0..self.rows.slots.len() {
                let (row, out) = (self.rows.row(i), self.out.add(i * self.padded));
                let mut at = 0;
                while at < whole {
                    let scale = self.decode.scale::<S>(row, at / group);
                    let end = whole.min(at + group);
                    while at < end {
                        S::store(out.add(at), self.decode.load::<S>(row, at, scale));
                        at += S::WIDTH;
                    }
                }
                if whole < self.dim {
                    self.tail::<S>(row, whole, out.add(whole));
                }
            }
        }
    }
}

impl<D: Decode> Unpack<'_, D> {
    /// Unpacks the last elements of a row, which are fewer than a vector, without reading past its end.
    #[inline(always)]
    unsafe fn tail<S: Simd>(&self, row: Row, at: usize, out: *mut f32) {
        let (begins, count) = (at * D::BITS / 8, self.dim - at);
        // Room for 16 elements of 32 bits.
        let mut codes = [0u8; 64];
        let mut numbers = [0f32; 16];
        // SAFETY: the caller upholds the contract. Only the end of the row is copied, which is shorter than a
        // vector.
        unsafe {
            std::ptr::copy_nonoverlapping(
                row[0].add(begins),
                codes.as_mut_ptr(),
                (count * D::BITS).div_ceil(8),
            );
            let scale = self.decode.scale::<S>(row, at / self.decode.group(self.dim));
            let row = [codes.as_ptr().wrapping_sub(begins), row[1], row[2]];
            S::store(numbers.as_mut_ptr(), self.decode.load::<S>(row, at, scale));
            std::ptr::copy_nonoverlapping(numbers.as_ptr(), out, self.padded - at);
        }
    }
}

/// Transposes [`TILE`] rows of `dim` numbers to `dim` rows of [`TILE`]. `dim` is a multiple of the vector
/// width.
pub(super) struct Transpose {
    pub from: *const f32,
    pub dim: usize,
    pub to: *mut f32,
}

impl Kernel for Transpose {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for slot in (0..TILE).step_by(S::WIDTH) {
            for at in (0..self.dim).step_by(S::WIDTH) {
                // SAFETY: the fields document the validity of the pointers.
                unsafe {
                    let from = self.from.add(slot * self.dim + at);
                    S::transpose(from, self.dim, self.to.add(at * TILE + slot), TILE);
                }
            }
        }
    }
}
