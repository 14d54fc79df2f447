//! The online softmax, and the merging of partial results.

use super::kernels::TILE;
use crate::simd::{Kernel, Simd};

/// The peak of a row that has not seen a slot. It is finite, so that the difference of two peaks is never
/// NaN.
pub(super) const NO_PEAK: f32 = f32::MIN;

/// Returns 2 to the power of numbers that are at most 0, or NaN. The error is at most 2 units in the last
/// place. Below -127 the result is zero.
#[inline(always)]
unsafe fn exp2<S: Simd>(x: S::F) -> S::F {
    // 2^r - 1 over r on [-0.5, 0.5]: the polynomial of Cephes' exp2f, by S. Moshier.
    const TERMS: [f32; 6] = [
        1.535_336_2e-4,
        1.339_887_4e-3,
        9.618_437e-3,
        5.550_332_5e-2,
        2.402_264_7e-1,
        6.931_472e-1,
    ];
    // Adding this number rounds to an integer. The lowest bits of the float32 sum are then those of the
    // integer.
    const INTEGER: f32 = 12_582_912.0;
    // SAFETY: the caller upholds the contract.
    unsafe {
        let x = S::max(S::splat(-127.0), x);
        let shifted = S::add(x, S::splat(INTEGER));
        let r = S::sub(x, S::sub(shifted, S::splat(INTEGER)));
        let mut sum = S::splat(TERMS[0]);
        for term in &TERMS[1..] {
            sum = S::fma(sum, r, S::splat(*term));
        }
        S::mul(S::fma(sum, r, S::splat(1.0)), S::pow2(shifted))
    }
}

/// The running totals of the scores of each query row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Totals {
    /// The largest score.
    pub peaks: *mut f32,
    /// The sum of 2 to the power of (score - peak).
    pub sums: *mut f32,
}

/// Converts the scores of a tile to weights, and updates the totals.
pub(super) struct Weigh<'a> {
    /// A row of [`TILE`] scores for each of `rows`. Each score is replaced by 2 to the power of (score -
    /// peak), or by 0 if the row does not see the slot.
    pub scores: *mut f32,
    /// The number of slots of the tile.
    pub count: usize,
    /// The indices of the query rows in the totals.
    pub rows: &'a [u32],
    /// For each row, a bit for each slot, which is set if the row sees it. At least one bit is set.
    pub seen: &'a [u64],
    pub totals: Totals,
    /// For each row, the factor by which sums of earlier tiles must be multiplied.
    pub keep: &'a mut [f32],
}

impl Kernel for Weigh<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let all = u64::MAX >> (TILE - self.count);
        for (i, (&row, &seen)) in self.rows.iter().zip(self.seen).enumerate() {
            // SAFETY: the fields document the validity of the pointers.
            unsafe {
                let scores = self.scores.add(i * TILE);
                for slot in self.count..TILE {
                    *scores.add(slot) = f32::NEG_INFINITY;
                }
                let mut hidden = all & !seen;
                while hidden != 0 {
                    *scores.add(hidden.trailing_zeros() as usize) = f32::NEG_INFINITY;
                    hidden &= hidden - 1;
                }
                let (peak, total) =
                    (self.totals.peaks.add(row as usize), self.totals.sums.add(row as usize));
                let before = *peak;
                let (now, sum) = match S::WIDTH {
                    16 => weigh::<S, { TILE / 16 }>(scores, before),
                    _ => weigh::<S, { TILE / 8 }>(scores, before),
                };
                let mut keep = 1.0;
                if now > before {
                    let mut powers = [0.0; 16];
                    S::store(powers.as_mut_ptr(), exp2::<S>(S::splat(before - now)));
                    keep = powers[0];
                }
                *peak = now;
                *total = *total * keep + sum;
                self.keep[i] = keep;
            }
        }
    }
}

/// Converts `N` vectors of scores to weights. Returns the new peak, which is at least `before`, and the sum
/// of the weights.
#[inline(always)]
unsafe fn weigh<S: Simd, const N: usize>(scores: *mut f32, before: f32) -> (f32, f32) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let mut x = [S::splat(0.0); N];
        for (i, x) in x.iter_mut().enumerate() {
            *x = S::load(scores.add(i * S::WIDTH));
        }
        let mut peaks = [x[0], x[1]];
        for i in 2..N {
            peaks[i % 2] = S::max(peaks[i % 2], x[i]);
        }
        let now = S::largest(S::max(peaks[0], peaks[1])).max(before);
        let mut sums = [S::splat(0.0); 2];
        for (i, &x) in x.iter().enumerate() {
            let weights = exp2::<S>(S::sub(x, S::splat(now)));
            S::store(scores.add(i * S::WIDTH), weights);
            sums[i % 2] = S::add(sums[i % 2], weights);
        }
        (now, S::sum(S::add(sums[0], sums[1])))
    }
}

/// Merges the partial results of one query row. Each partial result has a peak, a sum and weighted values.
pub(super) struct Merge<'a> {
    /// The totals of the first part. Those of the next part are `stride` numbers later.
    pub totals: Totals,
    pub totals_stride: usize,
    /// The weighted values of the first part, `dim` numbers.
    pub values: *const f32,
    pub values_stride: usize,
    pub parts: usize,
    /// The score of a sink, whose value is zeros.
    pub sink: Option<f32>,
    /// The weighted mean of the values, or zeros if the row has not seen a slot. It has the length of a row
    /// of `values`, a multiple of the vector width.
    pub out: &'a mut [f32],
}

impl Kernel for Merge<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the fields document the validity of the pointers.
        unsafe {
            let peak_of = |part: usize| *self.totals.peaks.add(part * self.totals_stride);
            let sum_of = |part: usize| *self.totals.sums.add(part * self.totals_stride);
            let mut peak = (0..self.parts).map(peak_of).fold(NO_PEAK, f32::max);
            let mut total = 0.0;
            if let Some(sink) = self.sink {
                peak = peak.max(sink);
                let mut powers = [0.0; 16];
                S::store(powers.as_mut_ptr(), exp2::<S>(S::splat(sink - peak)));
                total = powers[0];
            }
            self.out.fill(0.0);
            for part in 0..self.parts {
                // Skips parts that have not seen a slot. Parts with NaN are not skipped.
                if sum_of(part) == 0.0 {
                    continue;
                }
                let mut powers = [0.0; 16];
                S::store(powers.as_mut_ptr(), exp2::<S>(S::splat(peak_of(part) - peak)));
                let power = powers[0];
                total += power * sum_of(part);
                let values = self.values.add(part * self.values_stride);
                for at in (0..self.out.len()).step_by(S::WIDTH) {
                    let out = self.out.as_mut_ptr().add(at);
                    let sum = S::fma(S::splat(power), S::load(values.add(at)), S::load(out));
                    S::store(out, sum);
                }
            }
            if total != 0.0 {
                for number in self.out.iter_mut() {
                    *number /= total;
                }
            }
        }
    }
}
