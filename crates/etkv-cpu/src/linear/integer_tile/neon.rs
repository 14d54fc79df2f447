//! The kernel for NEON, which multiplies four rows at a time.

use std::arch::aarch64::*;

use super::{IntegerTile, FP4, INT8};
use crate::linear::blocks::with_rows;
use crate::linear::scales::NESTED;
use crate::linear::weights::{self, ROWS};
use crate::simd::Neon;

/// The number of rows of a vector.
const QUARTER: usize = ROWS / 4;

/// # Safety
/// The same as for [`IntegerTile::run`].
pub(super) unsafe fn run<const CODES: u8>(tile: &IntegerTile) {
    for quarter in 0..4 {
        // SAFETY: the caller upholds the contract.
        unsafe {
            with_rows!(tile.n, [1 2 3] or 4, |N| multiply::<CODES, N>(tile, quarter));
        }
    }
}

#[target_feature(enable = "neon")]
unsafe fn multiply<const CODES: u8, const N: usize>(tile: &IntegerTile, quarter: usize) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let mut sums = [vdupq_n_f32(0.0); N];
        let (mut weights, mut factors) = (tile.weights, tile.weights);
        let (size, of_factors) = (tile.stored.size(), tile.stored.shared().1);
        let is_biased = tile.stored.are_biased();
        let zero = i32::from(tile.codes.zero());
        let mut inputs = tile.inputs.cast::<i32>();
        let (mut scales, mut starts) = (tile.scales, tile.starts);
        for group in 0..tile.n_groups {
            if of_factors != 0 && group % NESTED == 0 {
                factors = weights;
                weights = weights.add(of_factors);
            }
            // A loaded vector has the rows of two quarters.
            let (of_weights, biases) =
                tile.stored.load::<Neon>(weights, factors, quarter / 2 * 2 * QUARTER);
            let (of_weights, biases) = (of_weights[quarter % 2], biases[quarter % 2]);
            weights = weights.add(size);
            let mut dots = [vdupq_n_s32(0); N];
            for _ in 0..tile.group / 8 {
                let at = weights.add(quarter * 4 * QUARTER);
                let (first, second) = if CODES != INT8 {
                    let codes = vld1q_u8(at);
                    weights = weights.add(4 * ROWS);
                    let (mut low, mut high) =
                        (vandq_u8(codes, vdupq_n_u8(15)), vshrq_n_u8::<4>(codes));
                    if CODES == FP4 {
                        let floats = vld1q_u8(weights::FP4.as_ptr());
                        (low, high) = (vqtbl1q_u8(floats, low), vqtbl1q_u8(floats, high));
                    }
                    let [low, high] = [low, high].map(|codes| vreinterpretq_s8_u8(codes));
                    let zero = vdupq_n_s8(zero as i8);
                    (vsubq_s8(low, zero), vsubq_s8(high, zero))
                } else {
                    let sign_bits = vdupq_n_u8(128);
                    let first = veorq_u8(vld1q_u8(at), sign_bits);
                    let second = veorq_u8(vld1q_u8(at.add(4 * ROWS)), sign_bits);
                    weights = weights.add(8 * ROWS);
                    (vreinterpretq_s8_u8(first), vreinterpretq_s8_u8(second))
                };
                for (i, dot) in dots.iter_mut().enumerate() {
                    let x = [*inputs.add(i), *inputs.add(N + i)];
                    let [x, y] = x.map(|x| vreinterpretq_s8_s32(vdupq_n_s32(x)));
                    *dot = vaddq_s32(*dot, vaddq_s32(dot4(first, x), dot4(second, y)));
                }
                inputs = inputs.add(2 * N);
            }
            for (i, sum) in sums.iter_mut().enumerate() {
                let mut dot = dots[i];
                if is_biased {
                    // The code of zero was subtracted from all codes. Adding it times the sum of the inputs
                    // reverses this.
                    let start = *starts.add(i);
                    dot = vaddq_s32(dot, vdupq_n_s32(start * zero));
                    *sum = vfmaq_n_f32(*sum, biases, *scales.add(i) * start as f32);
                }
                let scale = vmulq_n_f32(of_weights, *scales.add(i));
                *sum = vfmaq_f32(*sum, vcvtq_f32_s32(dot), scale);
            }
            scales = scales.add(N);
            starts = starts.add(N);
        }
        for (i, &sum) in sums.iter().enumerate() {
            vst1q_f32(tile.out.add(i * ROWS + quarter * QUARTER), sum);
        }
    }
}

/// Returns four sums, each of four products of bytes.
#[inline]
#[target_feature(enable = "neon")]
fn dot4(a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
    let high = vpaddlq_s16(vmull_high_s8(a, b));
    vpaddq_s32(low, high)
}
