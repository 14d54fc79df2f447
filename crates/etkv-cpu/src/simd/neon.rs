//! NEON, which every 64-bit ARM has. A vector is two registers, so that the packed integers of a vector start
//! at a byte boundary.

use std::arch::aarch64::*;
use std::arch::asm;
use std::array::from_fn;

use super::{bytes, operations, Kernel, Simd, E2M1, E4M3};

/// NEON.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Neon;

/// The safety conditions are those of the trait: pointers must be valid for the bytes that are read and
/// written. Every machine has the instructions.
impl Simd for Neon {
    const WIDTH: usize = 8;
    const ROWS: usize = 2;
    const COLS: usize = 2;
    type F = [float32x4_t; 2];
    type Table = (Self::F, Self::F);

    #[inline(always)]
    unsafe fn enter<K: Kernel>(kernel: K) {
        // SAFETY: see the trait.
        unsafe { kernel.run::<Self>() }
    }

    operations! {
        fn splat(x: f32) -> Self::F { [vdupq_n_f32(x); 2] }
        fn load(from: *const f32) -> Self::F { [vld1q_f32(from), vld1q_f32(from.add(4))] }

        fn store(to: *mut f32, x: Self::F) {
            vst1q_f32(to, x[0]);
            vst1q_f32(to.add(4), x[1]);
        }

        fn add(a: Self::F, b: Self::F) -> Self::F { from_fn(|i| vaddq_f32(a[i], b[i])) }
        fn sub(a: Self::F, b: Self::F) -> Self::F { from_fn(|i| vsubq_f32(a[i], b[i])) }
        fn mul(a: Self::F, b: Self::F) -> Self::F { from_fn(|i| vmulq_f32(a[i], b[i])) }

        fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
            from_fn(|i| vfmaq_f32(c[i], a[i], b[i]))
        }

        fn max(a: Self::F, b: Self::F) -> Self::F {
            // NaN takes precedence.
            from_fn(|i| vmaxq_f32(a[i], b[i]))
        }

        fn pow2(x: Self::F) -> Self::F {
            from_fn(|i| {
                let exponent = vshlq_n_u32::<23>(vreinterpretq_u32_f32(x[i]));
                vreinterpretq_f32_u32(vaddq_u32(exponent, vdupq_n_u32(0x3f80_0000)))
            })
        }

        fn sum(x: Self::F) -> f32 { vaddvq_f32(vaddq_f32(x[0], x[1])) }
        fn largest(x: Self::F) -> f32 { vmaxvq_f32(vmaxq_f32(x[0], x[1])) }

        fn sums(x: [Self::F; 4], to: *mut f32) {
            let [a, b, c, d] = x.map(|x| vaddq_f32(x[0], x[1]));
            vst1q_f32(to, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
        }

        fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
            for i in [0, 4] {
                for j in [0, 4] {
                    let from = from.add(i * from_stride + j);
                    let [a, b, c, d]: [float32x4_t; 4] =
                        from_fn(|row| vld1q_f32(from.add(row * from_stride)));
                    let wide = |x| vreinterpretq_f64_f32(x);
                    let narrow = |x| vreinterpretq_f32_f64(x);
                    let (ab, ab2) = (wide(vtrn1q_f32(a, b)), wide(vtrn2q_f32(a, b)));
                    let (cd, cd2) = (wide(vtrn1q_f32(c, d)), wide(vtrn2q_f32(c, d)));
                    let to = to.add(j * to_stride + i);
                    vst1q_f32(to, narrow(vtrn1q_f64(ab, cd)));
                    vst1q_f32(to.add(to_stride), narrow(vtrn1q_f64(ab2, cd2)));
                    vst1q_f32(to.add(2 * to_stride), narrow(vtrn2q_f64(ab, cd)));
                    vst1q_f32(to.add(3 * to_stride), narrow(vtrn2q_f64(ab2, cd2)));
                }
            }
        }

        fn f16(from: *const u8) -> Self::F {
            // This is assembly because stable Rust lacks the float16 types of NEON.
            let halves = vld1q_u16(from.cast());
            let (low, high): (float32x4_t, float32x4_t);
            asm!(
                "fcvtl {low:v}.4s, {halves:v}.4h",
                "fcvtl2 {high:v}.4s, {halves:v}.8h",
                low = out(vreg) low,
                high = lateout(vreg) high,
                halves = in(vreg) halves,
                options(pure, nomem, nostack, preserves_flags),
            );
            [low, high]
        }

        fn bf16(from: *const u8) -> Self::F {
            let halves = vld1q_u16(from.cast());
            [
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(halves))),
                vreinterpretq_f32_u32(vshll_high_n_u16::<16>(halves)),
            ]
        }

        fn splat_f16(from: *const u8) -> Self::F {
            let half = vdup_n_u16(from.cast::<u16>().read_unaligned());
            let wide: float32x4_t;
            asm!(
                "fcvtl {wide:v}.4s, {half:v}.4h",
                wide = lateout(vreg) wide,
                half = in(vreg) half,
                options(pure, nomem, nostack, preserves_flags),
            );
            [wide; 2]
        }

        fn integers<const BITS: usize>(from: *const u8) -> Self::F {
            if BITS == 8 {
                let wide = vmovl_u8(vld1_u8(from));
                return [
                    vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))),
                    vcvtq_f32_u32(vmovl_high_u16(wide)),
                ];
            }
            // Eight integers have `BITS` bytes.
            let codes = bytes::<BITS>(from) as u64;
            // Four integers of at most 6 bits fit 32 bits.
            from_fn(|half| {
                let shifts: [i32; 4] = from_fn(|i| -((i * BITS) as i32));
                let word = vdupq_n_u32((codes >> (4 * half * BITS)) as u32);
                let codes = vshlq_u32(word, vld1q_s32(shifts.as_ptr()));
                vcvtq_f32_u32(vandq_u32(codes, vdupq_n_u32((1 << BITS) - 1)))
            })
        }

        fn int4_table(scale: Self::F, offset: Self::F) -> Self::Table { (scale, offset) }

        fn int4(from: *const u8, table: Self::Table) -> Self::F {
            Self::fma(Self::integers::<4>(from), table.0, table.1)
        }

        fn e2m1_table(scale: Self::F) -> Self::Table { (scale, scale) }

        fn e2m1(from: *const u8, table: Self::Table) -> Self::F {
            // Each number times two is an integer of 8 bits.
            const TWICE: [i8; 16] = {
                let (mut twice, mut code) = ([0; 16], 0);
                while code < 16 {
                    twice[code] = (2.0 * E2M1[code]) as i8;
                    code += 1;
                }
                twice
            };
            let word = vcreate_u8(from.cast::<u32>().read_unaligned().into());
            let low = vand_u8(word, vdup_n_u8(15));
            let codes = vzip1_u8(low, vshr_n_u8::<4>(word));
            let twice = vmovl_s8(vqtbl1_s8(vld1q_s8(TWICE.as_ptr()), codes));
            let numbers = [
                vcvtq_n_f32_s32::<1>(vmovl_s16(vget_low_s16(twice))),
                vcvtq_n_f32_s32::<1>(vmovl_high_s16(twice)),
            ];
            Self::mul(numbers, table.0)
        }

        fn e4m3(from: *const u8) -> Self::F {
            let numbers: [f32; 8] = from_fn(|i| E4M3[usize::from(*from.add(i))]);
            Self::load(numbers.as_ptr())
        }
    }
}
