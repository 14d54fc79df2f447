//! The kernel for AVX2, which multiplies eight rows at a time.

use std::arch::x86_64::*;

use super::{IntegerTile, FP4, INT8};
use crate::linear::blocks::with_rows;
use crate::linear::scales::NESTED;
use crate::linear::weights::{self, ROWS};
use crate::simd::Avx2;

/// The number of rows of a vector.
const HALF: usize = ROWS / 2;

/// # Safety
/// The same as for [`IntegerTile::run`].
pub(super) unsafe fn run<const CODES: u8>(tile: &IntegerTile) {
    for half in 0..2 {
        // SAFETY: the caller upholds the contract.
        unsafe {
            with_rows!(tile.n, [1 2 3] or 4, |N| multiply::<CODES, N>(tile, half));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply<const CODES: u8, const N: usize>(tile: &IntegerTile, half: usize) {
    let mut sums = [_mm256_setzero_ps(); N];
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
            let (of_weights, biases) = tile.stored.load::<Avx2>(weights, factors, half * HALF);
            weights = weights.add(size);
            let mut codes = weights.add(half * 4 * HALF);
            let mut dots = [_mm256_setzero_si256(); N];
            for _ in 0..tile.group / 32 {
                if CODES == INT8 {
                    add_int8(&mut dots, codes, inputs);
                    codes = codes.add(8 * 4 * ROWS);
                } else {
                    add_4_bits::<CODES, N>(&mut dots, codes, inputs);
                    codes = codes.add(4 * 4 * ROWS);
                }
                inputs = inputs.add(8 * N);
            }
            weights = codes.sub(half * 4 * HALF);
            for (i, sum) in sums.iter_mut().enumerate() {
                // Codes of 8 bits are converted to signed numbers, so nothing must be subtracted.
                let start = match (CODES == INT8, is_biased) {
                    (false, false) => *starts.add(i),
                    (true, true) => 128 * *starts.add(i),
                    _ => 0,
                };
                let dot = _mm256_add_epi32(dots[i], _mm256_set1_epi32(start));
                if is_biased {
                    let of_inputs = _mm256_set1_ps(*scales.add(i) * *starts.add(i) as f32);
                    *sum = _mm256_fmadd_ps(biases, of_inputs, *sum);
                }
                let scale = _mm256_mul_ps(of_weights, _mm256_set1_ps(*scales.add(i)));
                *sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, *sum);
            }
            scales = scales.add(N);
            starts = starts.add(N);
        }
        for (i, &sum) in sums.iter().enumerate() {
            _mm256_storeu_ps(tile.out.add(i * ROWS + half * HALF), sum);
        }
    }
}

/// Adds the products of 32 columns. Eight sums of two products fit 16 bits: 8 * 2 * 15 * 127 is 30,480. With
/// the codes of floats only four sums fit: 4 * 2 * 24 * 127 is 24,384.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_4_bits<const CODES: u8, const N: usize>(
    dots: &mut [__m256i; N],
    codes: *const u8,
    inputs: *const i32,
) {
    let low_bits = _mm256_set1_epi8(15);
    // SAFETY: the table has 16 bytes.
    let floats =
        _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(weights::FP4.as_ptr().cast()) });
    let mut short = [_mm256_setzero_si256(); N];
    for eight in 0..4 {
        if CODES == FP4 && eight == 2 {
            add_short(dots, &short);
            short = [_mm256_setzero_si256(); N];
        }
        // SAFETY: the caller upholds the contract.
        unsafe {
            let both = _mm256_loadu_si256(codes.add(eight * 4 * ROWS).cast());
            let mut first = _mm256_and_si256(both, low_bits);
            let mut second = _mm256_and_si256(_mm256_srli_epi16::<4>(both), low_bits);
            if CODES == FP4 {
                first = _mm256_shuffle_epi8(floats, first);
                second = _mm256_shuffle_epi8(floats, second);
            }
            for (i, short) in short.iter_mut().enumerate() {
                let x = inputs.add(2 * eight * N + i);
                let low = _mm256_maddubs_epi16(first, _mm256_set1_epi32(*x));
                let high = _mm256_maddubs_epi16(second, _mm256_set1_epi32(*x.add(N)));
                *short = _mm256_add_epi16(*short, _mm256_add_epi16(low, high));
            }
        }
    }
    add_short(dots, &short);
}

/// Adds pairs of sums in 16 bits.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_short<const N: usize>(dots: &mut [__m256i; N], short: &[__m256i; N]) {
    for (dot, &short) in dots.iter_mut().zip(short) {
        *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(short, _mm256_set1_epi16(1)));
    }
}

/// Adds the products of 32 columns. The sign of a weight is moved to its input, so that the sum of two
/// products fits 16 bits: 2 * 128 * 127 is 32,512.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_int8<const N: usize>(dots: &mut [__m256i; N], codes: *const u8, inputs: *const i32) {
    let sign_bits = _mm256_set1_epi8(-128);
    for quad in 0..8 {
        // SAFETY: the caller upholds the contract.
        unsafe {
            let weights = _mm256_loadu_si256(codes.add(quad * 4 * ROWS).cast());
            let weights = _mm256_xor_si256(weights, sign_bits);
            let sizes = _mm256_abs_epi8(weights);
            for (i, dot) in dots.iter_mut().enumerate() {
                let x = _mm256_set1_epi32(*inputs.add(quad * N + i));
                let pairs = _mm256_maddubs_epi16(sizes, _mm256_sign_epi8(x, weights));
                *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            }
        }
    }
}
