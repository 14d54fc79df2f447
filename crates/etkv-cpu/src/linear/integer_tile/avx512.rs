//! The kernel for AVX-512 with VNNI, where one instruction computes the products of four bytes and their sum.

use std::arch::x86_64::*;

use super::{IntegerTile, FP4, INT8};
use crate::linear::blocks::with_rows;
use crate::linear::scales::NESTED;
use crate::linear::weights::{self, ROWS};
use crate::simd::Avx512;

/// The distance in bytes at which weights are prefetched.
const AHEAD: usize = 4096;

const LINE: usize = 64;

/// The maximum number of input rows with which weights are prefetched.
const FEW: usize = 4;

/// # Safety
/// The same as for [`IntegerTile::run`].
pub(super) unsafe fn run<const CODES: u8>(tile: &IntegerTile) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        with_rows!(tile.n, [1 2 3 4 5 6 7 8 9 10 11] or 12, |N| multiply::<CODES, N>(tile));
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c")]
unsafe fn multiply<const CODES: u8, const N: usize>(tile: &IntegerTile) {
    let low_bits = _mm512_set1_epi8(15);
    // SAFETY: the table has 16 bytes.
    let floats = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(weights::FP4.as_ptr().cast()) });
    let mut sums = [_mm512_setzero_ps(); N];
    let (mut weights, mut factors) = (tile.weights, tile.weights);
    let (size, of_factors) = (tile.stored.size(), tile.stored.shared().1);
    let is_biased = tile.stored.are_biased();
    let mut inputs = tile.inputs.cast::<i32>();
    let (mut scales, mut starts) = (tile.scales, tile.starts);
    // SAFETY: the caller upholds the contract.
    unsafe {
        for group in 0..tile.n_groups {
            if of_factors != 0 && group % NESTED == 0 {
                factors = weights;
                weights = weights.add(of_factors);
            }
            let (of_weights, biases) = tile.stored.load::<Avx512>(weights, factors, 0);
            weights = weights.add(size);
            let mut dots = [_mm512_setzero_si512(); N];
            if is_biased {
                for (i, sum) in sums.iter_mut().enumerate() {
                    let of_inputs = _mm512_set1_ps(*scales.add(i) * *starts.add(i) as f32);
                    *sum = _mm512_fmadd_ps(biases, of_inputs, *sum);
                }
            } else {
                for (i, dot) in dots.iter_mut().enumerate() {
                    *dot = _mm512_set1_epi32(*starts.add(i));
                }
            }
            for _ in 0..tile.group / 8 {
                if N <= FEW {
                    // With few input rows, memory limits the speed. The weights of the next tile follow in
                    // memory.
                    _mm_prefetch::<_MM_HINT_T0>(weights.wrapping_add(AHEAD).cast());
                    if CODES == INT8 {
                        _mm_prefetch::<_MM_HINT_T0>(weights.wrapping_add(AHEAD + LINE).cast());
                    }
                }
                let (first, second) = if CODES == INT8 {
                    let first = _mm512_loadu_si512(weights.cast());
                    let second = _mm512_loadu_si512(weights.add(4 * ROWS).cast());
                    weights = weights.add(8 * ROWS);
                    (first, second)
                } else {
                    let codes = _mm512_loadu_si512(weights.cast());
                    weights = weights.add(4 * ROWS);
                    let low = _mm512_and_si512(codes, low_bits);
                    let high = _mm512_and_si512(_mm512_srli_epi16::<4>(codes), low_bits);
                    if CODES == FP4 {
                        (_mm512_shuffle_epi8(floats, low), _mm512_shuffle_epi8(floats, high))
                    } else {
                        (low, high)
                    }
                };
                for (i, dot) in dots.iter_mut().enumerate() {
                    *dot = _mm512_dpbusd_epi32(*dot, first, _mm512_set1_epi32(*inputs.add(i)));
                }
                for (i, dot) in dots.iter_mut().enumerate() {
                    let input = _mm512_set1_epi32(*inputs.add(N + i));
                    *dot = _mm512_dpbusd_epi32(*dot, second, input);
                }
                inputs = inputs.add(2 * N);
            }
            for (i, sum) in sums.iter_mut().enumerate() {
                let scale = _mm512_mul_ps(of_weights, _mm512_set1_ps(*scales.add(i)));
                *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[i]), scale, *sum);
            }
            scales = scales.add(N);
            starts = starts.add(N);
        }
        for (i, &sum) in sums.iter().enumerate() {
            _mm512_storeu_ps(tile.out.add(i * ROWS), sum);
        }
    }
}
