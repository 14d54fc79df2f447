//! AVX2 with FMA and F16C: Intel since 2013, AMD since 2015.

use std::arch::x86_64::*;

use super::{bytes, operations, places, Kernel, Simd, E2M1};

/// AVX2.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2;

impl Avx2 {
    /// Returns whether the machine has the instructions.
    pub fn detected() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
    }

    /// Returns the integers of `BITS` bits in elements of 32 bits. Bits above the integers are not cleared.
    #[inline(always)]
    unsafe fn shifted<const BITS: usize>(from: *const u8) -> __m256i {
        const {
            assert!(matches!(BITS, 2..=6 | 8));
        }
        // SAFETY: the machine has AVX2, and 8 integers have `BITS` bytes.
        unsafe {
            if BITS == 8 {
                return _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
            }
            if BITS == 4 {
                let words = _mm256_set1_epi32(from.cast::<i32>().read_unaligned());
                return _mm256_srlv_epi32(words, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
            }
            let (at, by) = const { places::<8>(BITS) };
            let codes = _mm256_set1_epi64x(bytes::<BITS>(from) as i64);
            let apart = _mm256_shuffle_epi8(codes, _mm256_loadu_si256(at.as_ptr().cast()));
            _mm256_srlv_epi32(apart, _mm256_loadu_si256(by.as_ptr().cast()))
        }
    }
}

/// The safety conditions are those of the trait: the machine must have AVX2, FMA and F16C, and pointers must
/// be valid for the bytes that are read and written.
impl Simd for Avx2 {
    const WIDTH: usize = 8;
    const ROWS: usize = 3;
    const COLS: usize = 2;
    type F = __m256;
    type Table = (Self::F, Self::F);

    #[inline(always)]
    unsafe fn enter<K: Kernel>(kernel: K) {
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn inside<K: Kernel>(kernel: K) {
            // SAFETY: the caller upholds the contract.
            unsafe { kernel.run::<Avx2>() }
        }
        // SAFETY: the caller upholds the contract.
        unsafe { inside(kernel) }
    }

    operations! {
        fn splat(x: f32) -> Self::F { _mm256_set1_ps(x) }
        fn load(from: *const f32) -> Self::F { _mm256_loadu_ps(from) }
        fn store(to: *mut f32, x: Self::F) { _mm256_storeu_ps(to, x) }
        fn add(a: Self::F, b: Self::F) -> Self::F { _mm256_add_ps(a, b) }
        fn sub(a: Self::F, b: Self::F) -> Self::F { _mm256_sub_ps(a, b) }
        fn mul(a: Self::F, b: Self::F) -> Self::F { _mm256_mul_ps(a, b) }
        fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F { _mm256_fmadd_ps(a, b, c) }
        fn max(a: Self::F, b: Self::F) -> Self::F { _mm256_max_ps(a, b) }

        fn pow2(x: Self::F) -> Self::F {
            let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(x));
            _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f80_0000)))
        }

        fn sum(x: Self::F) -> f32 {
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        }

        fn largest(x: Self::F) -> f32 {
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
        }

        fn sums(x: [Self::F; 4], to: *mut f32) {
            let ab = _mm256_hadd_ps(x[0], x[1]);
            let cd = _mm256_hadd_ps(x[2], x[3]);
            let parts = _mm256_hadd_ps(ab, cd);
            let one = _mm_add_ps(_mm256_castps256_ps128(parts), _mm256_extractf128_ps::<1>(parts));
            _mm_storeu_ps(to, one);
        }

        fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
            let mut rows = [_mm256_setzero_ps(); 8];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = _mm256_loadu_ps(from.add(i * from_stride));
            }
            // First transpose blocks of 4 by 4 within parts of 128 bits.
            let mut blocks = rows;
            for i in [0, 4] {
                let low = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
                let high = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
                let low2 = _mm256_unpacklo_ps(rows[i + 2], rows[i + 3]);
                let high2 = _mm256_unpackhi_ps(rows[i + 2], rows[i + 3]);
                blocks[i] = _mm256_shuffle_ps::<0b01_00_01_00>(low, low2);
                blocks[i + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(low, low2);
                blocks[i + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(high, high2);
                blocks[i + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(high, high2);
            }
            // Then exchange the parts.
            for i in 0..4 {
                let low = _mm256_permute2f128_ps::<0x20>(blocks[i], blocks[i + 4]);
                let high = _mm256_permute2f128_ps::<0x31>(blocks[i], blocks[i + 4]);
                _mm256_storeu_ps(to.add(i * to_stride), low);
                _mm256_storeu_ps(to.add((4 + i) * to_stride), high);
            }
        }

        fn f16(from: *const u8) -> Self::F { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }

        fn bf16(from: *const u8) -> Self::F {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }

        fn splat_f16(from: *const u8) -> Self::F {
            _mm256_cvtph_ps(_mm_set1_epi16(from.cast::<i16>().read_unaligned()))
        }

        fn integers<const BITS: usize>(from: *const u8) -> Self::F {
            let codes = Self::shifted::<BITS>(from);
            _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32((1 << BITS) - 1)))
        }

        fn int4_table(scale: Self::F, offset: Self::F) -> Self::Table { (scale, offset) }

        fn int4(from: *const u8, table: Self::Table) -> Self::F {
            Self::fma(Self::integers::<4>(from), table.0, table.1)
        }

        fn e2m1_table(scale: Self::F) -> Self::Table { (scale, scale) }

        fn e2m1(from: *const u8, table: Self::Table) -> Self::F {
            let codes = Self::shifted::<4>(from);
            // The permutation uses only the lowest three bits of an index.
            let size = _mm256_permutevar8x32_ps(_mm256_loadu_ps(E2M1.as_ptr()), codes);
            let sign = _mm256_slli_epi32::<28>(codes);
            let sign = _mm256_and_si256(sign, _mm256_set1_epi32(i32::MIN));
            _mm256_mul_ps(_mm256_or_ps(size, _mm256_castsi256_ps(sign)), table.0)
        }

        fn e4m3(from: *const u8) -> Self::F {
            // After the shift, the code has the bits of a float16 whose value is 2^8 times smaller than the
            // code's value. This is also true for subnormal numbers.
            let codes = _mm_cvtepi8_epi16(_mm_loadl_epi64(from.cast()));
            let bits = _mm_and_si128(_mm_slli_epi16::<7>(codes), _mm_set1_epi16(0xbf80_u16 as i16));
            _mm256_mul_ps(_mm256_cvtph_ps(bits), _mm256_set1_ps(256.0))
        }
    }
}
