//! Vectors for every machine, which the compiler vectorizes.

use std::array::from_fn;

use half::{bf16, f16};

use super::{bytes, operations, Kernel, Simd, E2M1, E4M3};

/// No specific instruction set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

/// The safety conditions are those of the trait: pointers must be valid for the bytes that are read and
/// written.
impl Simd for Portable {
    const WIDTH: usize = 8;
    const ROWS: usize = 0;
    const COLS: usize = 2;
    type F = [f32; 8];
    type Table = (Self::F, Self::F);

    #[inline(always)]
    unsafe fn enter<K: Kernel>(kernel: K) {
        // SAFETY: every machine has these instructions.
        unsafe { kernel.run::<Self>() }
    }

    operations! {
        fn splat(x: f32) -> Self::F { [x; 8] }
        fn load(from: *const f32) -> Self::F { from.cast::<Self::F>().read_unaligned() }
        fn store(to: *mut f32, x: Self::F) { to.cast::<Self::F>().write_unaligned(x) }
        fn add(a: Self::F, b: Self::F) -> Self::F { from_fn(|i| a[i] + b[i]) }
        fn sub(a: Self::F, b: Self::F) -> Self::F { from_fn(|i| a[i] - b[i]) }
        fn mul(a: Self::F, b: Self::F) -> Self::F { from_fn(|i| a[i] * b[i]) }

        fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
            // `f32::mul_add` would be a library call on machines without such an instruction.
            from_fn(|i| a[i] * b[i] + c[i])
        }

        fn max(a: Self::F, b: Self::F) -> Self::F {
            from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
        }

        fn pow2(x: Self::F) -> Self::F {
            from_fn(|i| f32::from_bits((x[i].to_bits() << 23).wrapping_add(0x3f80_0000)))
        }

        fn sum(x: Self::F) -> f32 {
            let x: [f32; 4] = from_fn(|i| x[i] + x[i + 4]);
            (x[0] + x[2]) + (x[1] + x[3])
        }

        fn largest(x: Self::F) -> f32 { x.into_iter().fold(f32::NEG_INFINITY, f32::max) }

        fn sums(x: [Self::F; 4], to: *mut f32) {
            for (i, x) in x.into_iter().enumerate() {
                to.add(i).write(Self::sum(x));
            }
        }

        fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
            for i in 0..8 {
                for j in 0..8 {
                    to.add(j * to_stride + i).write(from.add(i * from_stride + j).read());
                }
            }
        }

        fn f16(from: *const u8) -> Self::F {
            let bits = from.cast::<[u16; 8]>().read_unaligned();
            from_fn(|i| f16::from_bits(bits[i]).to_f32_const())
        }

        fn bf16(from: *const u8) -> Self::F {
            let bits = from.cast::<[u16; 8]>().read_unaligned();
            from_fn(|i| bf16::from_bits(bits[i]).to_f32_const())
        }

        fn splat_f16(from: *const u8) -> Self::F {
            let bits = from.cast::<u16>().read_unaligned();
            [f16::from_bits(bits).to_f32_const(); 8]
        }

        fn integers<const BITS: usize>(from: *const u8) -> Self::F {
            // Eight integers have `BITS` bytes.
            let word = bytes::<BITS>(from) as u64;
            from_fn(|i| ((word >> (i * BITS)) & ((1 << BITS) - 1)) as f32)
        }

        fn int4_table(scale: Self::F, offset: Self::F) -> Self::Table { (scale, offset) }

        fn int4(from: *const u8, table: Self::Table) -> Self::F {
            Self::fma(Self::integers::<4>(from), table.0, table.1)
        }

        fn e2m1_table(scale: Self::F) -> Self::Table { (scale, scale) }

        fn e2m1(from: *const u8, table: Self::Table) -> Self::F {
            let word = from.cast::<u32>().read_unaligned();
            from_fn(|i| E2M1[(word >> (4 * i)) as usize & 15] * table.0[i])
        }

        fn e4m3(from: *const u8) -> Self::F {
            let codes = from.cast::<[u8; 8]>().read_unaligned();
            from_fn(|i| E4M3[usize::from(codes[i])])
        }
    }
}
