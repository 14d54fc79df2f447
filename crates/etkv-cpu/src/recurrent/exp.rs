//! The exponential function of the kernels.

use crate::simd::Simd;

/// The minimum log decay, at which [`exp`] is zero. It limits the sums of log decays, so that their
/// differences are not NaN even after a decay to zero.
pub(super) const MIN_LOG_DECAY: f32 = -88.0;

/// Returns e to the power of each number, with an error of about 2 units in the last place. Numbers are first
/// clamped to the range from -88, where the result is zero, to 88. NaN stays NaN.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    // (e^r - 1 - r) / r^2 over r on [-ln 2 / 2, ln 2 / 2]: the polynomial of Cephes' expf, by S. Moshier.
    const TERMS: [f32; 6] =
        [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    // ln 2 in two parts; products of the first with small integers are exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    // Adding this number rounds to an integer. The lowest bits of the float32 sum are then those of the
    // integer.
    const INTEGER: f32 = 12_582_912.0;
    // SAFETY: the caller upholds the contract.
    unsafe {
        let zero = S::splat(0.0);
        let x = S::max(S::splat(MIN_LOG_DECAY), x);
        let x = S::sub(zero, S::max(S::splat(MIN_LOG_DECAY), S::sub(zero, x)));
        let shifted = S::fma(x, S::splat(std::f32::consts::LOG2_E), S::splat(INTEGER));
        let n = S::sub(shifted, S::splat(INTEGER));
        let r = S::fma(n, S::splat(-LN_2[0]), x);
        let r = S::fma(n, S::splat(-LN_2[1]), r);
        let mut sum = S::splat(TERMS[0]);
        for term in &TERMS[1..] {
            sum = S::fma(sum, r, S::splat(*term));
        }
        let sum = S::add(S::fma(sum, S::mul(r, r), r), S::splat(1.0));
        S::mul(sum, S::pow2(shifted))
    }
}
