//! The online softmax, and how parts of it are put together.

use super::kernels::TILE;
use super::simd::{Kernel, Simd};

/// The peak of a row that has seen nothing. It is finite, so that no difference of two peaks is NaN.
pub(super) const NO_PEAK: f32 = f32::MIN;

/// Returns 2 to the power of numbers that are at most 0, or NaN. It is off by at most 2 units in
/// the last place. Below -127 it is zero.
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
    // A float32 of this size is an integer; its lowest bits are those of what was added.
    const INTEGER: f32 = 12_582_912.0;
    // SAFETY: the caller's.
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

/// What is known of the scores of each query row so far.
#[derive(Debug, Clone, Copy)]
pub(super) struct Totals {
    /// The largest score.
    pub peaks: *mut f32,
    /// The sum of 2 to the power of each score less the peak.
    pub sums: *mut f32,
}

/// Turns the scores of a tile into weights, and updates the totals.
pub(super) struct Weigh<'a> {
    /// A row of [`TILE`] scores for each of `rows`. They become 2 to the power of the score less the
    /// row's peak, and zeros for slots that the row does not see.
    pub scores: *mut f32,
    /// The slots of the tile.
    pub count: usize,
    /// The query rows, as the totals count them.
    pub rows: &'a [u32],
    /// For each row, one bit for each slot that it sees; at least one is set.
    pub seen: &'a [u64],
    pub totals: Totals,
    /// For each row, what the weights of earlier tiles are multiplied with.
    pub keep: &'a mut [f32],
}

impl Kernel for Weigh<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let all = u64::MAX >> (TILE - self.count);
        let padded = self.count.next_multiple_of(S::LANES);
        // SAFETY: the pointers are as the fields say; rows have `TILE` scores, and `padded` is no more.
        unsafe {
            for (i, &row) in self.rows.iter().enumerate() {
                let scores = self.scores.add(i * TILE);
                for slot in self.count..padded {
                    *scores.add(slot) = f32::NEG_INFINITY;
                }
                let mut hidden = all & !self.seen[i];
                while hidden != 0 {
                    *scores.add(hidden.trailing_zeros() as usize) = f32::NEG_INFINITY;
                    hidden &= hidden - 1;
                }
                let mut peaks = S::load(scores);
                for at in (S::LANES..padded).step_by(S::LANES) {
                    peaks = S::max(peaks, S::load(scores.add(at)));
                }
                let (peak, total) =
                    (self.totals.peaks.add(row as usize), self.totals.sums.add(row as usize));
                let before = *peak;
                let now = S::largest(peaks).max(before);
                let mut keep = 1.0;
                if now > before {
                    let mut powers = [0.0; 16];
                    S::store(powers.as_mut_ptr(), exp2::<S>(S::splat(before - now)));
                    keep = powers[0];
                }
                let mut sum = S::splat(0.0);
                for at in (0..padded).step_by(S::LANES) {
                    let score = S::sub(S::load(scores.add(at)), S::splat(now));
                    let weight = exp2::<S>(score);
                    S::store(scores.add(at), weight);
                    sum = S::add(sum, weight);
                }
                *peak = now;
                *total = *total * keep + S::sum(sum);
                self.keep[i] = keep;
            }
        }
    }
}

/// Puts the parts of one query row together: each has a peak, a sum and the weighted values.
pub(super) struct Merge<'a> {
    /// The peak of the first part; the next is `stride` numbers on. So with the others.
    pub totals: Totals,
    pub totals_stride: usize,
    /// The weighted values of the first part, `dim` numbers.
    pub values: *const f32,
    pub values_stride: usize,
    pub parts: usize,
    /// The mean of the values by their weights; zeros if the row has seen nothing. As long as a row
    /// of `values`, a multiple of the lanes.
    pub out: &'a mut [f32],
}

impl Kernel for Merge<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the pointers are as the fields say.
        unsafe {
            let peak_of = |part: usize| *self.totals.peaks.add(part * self.totals_stride);
            let sum_of = |part: usize| *self.totals.sums.add(part * self.totals_stride);
            let peak = (0..self.parts).map(peak_of).fold(NO_PEAK, f32::max);
            self.out.fill(0.0);
            let mut total = 0.0;
            for part in 0..self.parts {
                // A part that has seen nothing has no weight. One of NaN has.
                if sum_of(part) == 0.0 {
                    continue;
                }
                let mut powers = [0.0; 16];
                S::store(powers.as_mut_ptr(), exp2::<S>(S::splat(peak_of(part) - peak)));
                let power = powers[0];
                total += power * sum_of(part);
                let values = self.values.add(part * self.values_stride);
                for at in (0..self.out.len()).step_by(S::LANES) {
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
