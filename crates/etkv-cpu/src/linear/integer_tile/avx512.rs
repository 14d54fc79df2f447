//! The kernel for AVX-512 with VNNI, where one instruction computes the products of four bytes and their sum.

use std::arch::x86_64::*;

use super::IntegerTile;
use crate::linear::scales::NESTED;
use crate::linear::weights::ROWS;
use crate::simd::Avx512;

/// The distance in bytes at which weights are prefetched.
const AHEAD: usize = 4096;

const LINE: usize = 64;

/// The maximum number of input rows with which weights are prefetched.
const FEW: usize = 4;

/// # Safety
/// The same as for [`IntegerTile::run`].
pub(super) unsafe fn run<const IS_INT4: bool>(tile: &IntegerTile) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        match tile.n {
            1 => multiply::<IS_INT4, 1>(tile),
            2 => multiply::<IS_INT4, 2>(tile),
            3 => multiply::<IS_INT4, 3>(tile),
            4 => multiply::<IS_INT4, 4>(tile),
            5 => multiply::<IS_INT4, 5>(tile),
            6 => multiply::<IS_INT4, 6>(tile),
            7 => multiply::<IS_INT4, 7>(tile),
            8 => multiply::<IS_INT4, 8>(tile),
            9 => multiply::<IS_INT4, 9>(tile),
            10 => multiply::<IS_INT4, 10>(tile),
            11 => multiply::<IS_INT4, 11>(tile),
            _ => multiply::<IS_INT4, 12>(tile),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c")]
unsafe fn multiply<const IS_INT4: bool, const N: usize>(tile: &IntegerTile) {
    let low_bits = _mm512_set1_epi8(15);
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
                    if !IS_INT4 {
                        _mm_prefetch::<_MM_HINT_T0>(weights.wrapping_add(AHEAD + LINE).cast());
                    }
                }
                let (first, second) = if IS_INT4 {
                    let codes = _mm512_loadu_si512(weights.cast());
                    weights = weights.add(4 * ROWS);
                    let high = _mm512_and_si512(_mm512_srli_epi16::<4>(codes), low_bits);
                    (_mm512_and_si512(codes, low_bits), high)
                } else {
                    let first = _mm512_loadu_si512(weights.cast());
                    let second = _mm512_loadu_si512(weights.add(4 * ROWS).cast());
                    weights = weights.add(8 * ROWS);
                    (first, second)
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
