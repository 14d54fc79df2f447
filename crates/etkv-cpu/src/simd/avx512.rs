//! AVX-512: F, BW, DQ and VL, which all recent machines with AVX-512 have.

use std::arch::x86_64::*;

use super::{bytes, operations, places, Kernel, Simd, E2M1};

/// AVX-512.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512;

impl Avx512 {
    /// Returns whether the machine has the instructions.
    pub fn detected() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
    }

    #[inline(always)]
    unsafe fn splat_u128(x: u128) -> __m512i {
        // SAFETY: the machine has AVX-512.
        unsafe { _mm512_broadcast_i32x4(_mm_set_epi64x((x >> 64) as i64, x as i64)) }
    }

    /// Returns the integers of `BITS` bits, in 32 bits each; the bits above them are not cleared.
    #[inline(always)]
    unsafe fn shifted<const BITS: usize>(from: *const u8) -> __m512i {
        const {
            assert!(matches!(BITS, 2..=6 | 8));
        }
        // SAFETY: the machine has AVX-512; 16 integers are `2 * BITS` bytes.
        unsafe {
            let (at, by) = const { places::<16>(BITS) };
            let codes = match BITS {
                2 => _mm512_set1_epi32(bytes::<4>(from) as i32),
                3 => _mm512_set1_epi64(bytes::<6>(from) as i64),
                4 => _mm512_set1_epi64(bytes::<8>(from) as i64),
                5 => Self::splat_u128(bytes::<10>(from)),
                6 => Self::splat_u128(bytes::<12>(from)),
                _ => return _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())),
            };
            let apart = _mm512_shuffle_epi8(codes, _mm512_loadu_si512(at.as_ptr().cast()));
            _mm512_srlv_epi32(apart, _mm512_loadu_si512(by.as_ptr().cast()))
        }
    }
}

/// The safety conditions are those of the trait: the machine must have AVX-512, and pointers must be valid
/// for the bytes that are read and written.
impl Simd for Avx512 {
    const WIDTH: usize = 16;
    const ROWS: usize = 4;
    const COLS: usize = 4;
    type F = __m512;
    type Table = __m512;

    #[inline(always)]
    unsafe fn enter<K: Kernel>(kernel: K) {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        unsafe fn inside<K: Kernel>(kernel: K) {
            // SAFETY: the caller upholds the contract.
            unsafe { kernel.run::<Avx512>() }
        }
        // SAFETY: the caller upholds the contract.
        unsafe { inside(kernel) }
    }

    operations! {
        fn splat(x: f32) -> Self::F { _mm512_set1_ps(x) }
        fn load(from: *const f32) -> Self::F { _mm512_loadu_ps(from) }
        fn store(to: *mut f32, x: Self::F) { _mm512_storeu_ps(to, x) }
        fn add(a: Self::F, b: Self::F) -> Self::F { _mm512_add_ps(a, b) }
        fn sub(a: Self::F, b: Self::F) -> Self::F { _mm512_sub_ps(a, b) }
        fn mul(a: Self::F, b: Self::F) -> Self::F { _mm512_mul_ps(a, b) }
        fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F { _mm512_fmadd_ps(a, b, c) }
        fn max(a: Self::F, b: Self::F) -> Self::F { _mm512_max_ps(a, b) }

        fn pow2(x: Self::F) -> Self::F {
            let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(x));
            _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f80_0000)))
        }

        fn sum(x: Self::F) -> f32 { _mm512_reduce_add_ps(x) }
        fn largest(x: Self::F) -> f32 { _mm512_reduce_max_ps(x) }

        fn sums(x: [Self::F; 4], to: *mut f32) {
            let [a, b, c, d] = x;
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            // Each part of 128 bits has a partial sum of each of the four vectors, in order.
            let low = _mm512_shuffle_ps::<0b01_00_01_00>(ab, cd);
            let high = _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd);
            let parts = _mm512_add_ps(low, high);
            let two =
                _mm256_add_ps(_mm512_castps512_ps256(parts), _mm512_extractf32x8_ps::<1>(parts));
            let one = _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps::<1>(two));
            _mm_storeu_ps(to, one);
        }

        fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
            let mut rows = [_mm512_setzero_ps(); 16];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = _mm512_loadu_ps(from.add(i * from_stride));
            }
            // First transpose blocks of 4 by 4 within parts of 128 bits.
            let mut blocks = rows;
            for i in (0..16).step_by(4) {
                let low = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
                let high = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
                let low2 = _mm512_unpacklo_ps(rows[i + 2], rows[i + 3]);
                let high2 = _mm512_unpackhi_ps(rows[i + 2], rows[i + 3]);
                blocks[i] = _mm512_shuffle_ps::<0b01_00_01_00>(low, low2);
                blocks[i + 1] = _mm512_shuffle_ps::<0b11_10_11_10>(low, low2);
                blocks[i + 2] = _mm512_shuffle_ps::<0b01_00_01_00>(high, high2);
                blocks[i + 3] = _mm512_shuffle_ps::<0b11_10_11_10>(high, high2);
            }
            // Then exchange the parts.
            for i in 0..4 {
                let [a, b, c, d] = [blocks[i], blocks[i + 4], blocks[i + 8], blocks[i + 12]];
                let even = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
                let odd = _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b);
                let even2 = _mm512_shuffle_f32x4::<0b10_00_10_00>(c, d);
                let odd2 = _mm512_shuffle_f32x4::<0b11_01_11_01>(c, d);
                let columns = [
                    _mm512_shuffle_f32x4::<0b10_00_10_00>(even, even2),
                    _mm512_shuffle_f32x4::<0b10_00_10_00>(odd, odd2),
                    _mm512_shuffle_f32x4::<0b11_01_11_01>(even, even2),
                    _mm512_shuffle_f32x4::<0b11_01_11_01>(odd, odd2),
                ];
                for (part, column) in columns.into_iter().enumerate() {
                    _mm512_storeu_ps(to.add((4 * part + i) * to_stride), column);
                }
            }
        }

        fn f16(from: *const u8) -> Self::F { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }

        fn bf16(from: *const u8) -> Self::F {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }

        fn splat_f16(from: *const u8) -> Self::F {
            _mm512_cvtph_ps(_mm256_set1_epi16(from.cast::<i16>().read_unaligned()))
        }

        fn integers<const BITS: usize>(from: *const u8) -> Self::F {
            let codes = Self::shifted::<BITS>(from);
            _mm512_cvtepi32_ps(_mm512_and_si512(codes, _mm512_set1_epi32((1 << BITS) - 1)))
        }

        fn int4_table(scale: Self::F, offset: Self::F) -> Self::Table {
            const INTEGERS: [f32; 16] =
                [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];
            _mm512_fmadd_ps(_mm512_loadu_ps(INTEGERS.as_ptr()), scale, offset)
        }

        fn int4(from: *const u8, table: Self::Table) -> Self::F {
            // The permutation uses only the lowest four bits of an index.
            _mm512_permutexvar_ps(Self::shifted::<4>(from), table)
        }

        fn e2m1_table(scale: Self::F) -> Self::Table {
            _mm512_mul_ps(_mm512_loadu_ps(E2M1.as_ptr()), scale)
        }

        fn e2m1(from: *const u8, table: Self::Table) -> Self::F {
            // The permutation uses only the lowest four bits of an index.
            _mm512_permutexvar_ps(Self::shifted::<4>(from), table)
        }

        fn e4m3(from: *const u8) -> Self::F {
            // After the shift, the code has the bits of a float16 whose value is 2^8 times smaller than the
            // code's value. This is also true for subnormal numbers.
            let codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(from.cast()));
            let bits = _mm256_slli_epi16::<7>(codes);
            let bits = _mm256_and_si256(bits, _mm256_set1_epi16(0xbf80_u16 as i16));
            _mm512_mul_ps(_mm512_cvtph_ps(bits), _mm512_set1_ps(256.0))
        }
    }
}
