//! Vectors for every machine, which the compiler vectorizes.

use std::array::from_fn;

use half::{bf16, f16};

use super::{bytes, Kernel, Simd, E2M1, E4M3};

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

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        [x; 8]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        // SAFETY: the caller upholds the contract.
        unsafe { from.cast::<Self::F>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, x: Self::F) {
        // SAFETY: the caller upholds the contract.
        unsafe { to.cast::<Self::F>().write_unaligned(x) }
    }

    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] - b[i])
    }

    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // `f32::mul_add` would be a library call on machines without such an instruction.
        from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    unsafe fn pow2(x: Self::F) -> Self::F {
        from_fn(|i| f32::from_bits((x[i].to_bits() << 23).wrapping_add(0x3f80_0000)))
    }

    #[inline(always)]
    unsafe fn sum(x: Self::F) -> f32 {
        let x: [f32; 4] = from_fn(|i| x[i] + x[i + 4]);
        (x[0] + x[2]) + (x[1] + x[3])
    }

    #[inline(always)]
    unsafe fn largest(x: Self::F) -> f32 {
        x.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    #[inline(always)]
    unsafe fn sums(x: [Self::F; 4], to: *mut f32) {
        for (i, x) in x.into_iter().enumerate() {
            // SAFETY: the caller upholds the contract.
            unsafe { to.add(i).write(Self::sum(x)) };
        }
    }

    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        for i in 0..8 {
            for j in 0..8 {
                // SAFETY: the caller upholds the contract.
                unsafe { to.add(j * to_stride + i).write(from.add(i * from_stride + j).read()) };
            }
        }
    }

    #[inline(always)]
    unsafe fn f16(from: *const u8) -> Self::F {
        // SAFETY: the caller upholds the contract.
        let bits = unsafe { from.cast::<[u16; 8]>().read_unaligned() };
        from_fn(|i| f16::from_bits(bits[i]).to_f32_const())
    }

    #[inline(always)]
    unsafe fn bf16(from: *const u8) -> Self::F {
        // SAFETY: the caller upholds the contract.
        let bits = unsafe { from.cast::<[u16; 8]>().read_unaligned() };
        from_fn(|i| bf16::from_bits(bits[i]).to_f32_const())
    }

    #[inline(always)]
    unsafe fn splat_f16(from: *const u8) -> Self::F {
        // SAFETY: the caller upholds the contract.
        let bits = unsafe { from.cast::<u16>().read_unaligned() };
        [f16::from_bits(bits).to_f32_const(); 8]
    }

    #[inline(always)]
    unsafe fn integers<const BITS: usize>(from: *const u8) -> Self::F {
        // SAFETY: the caller upholds the contract. Eight integers have `BITS` bytes.
        let word = unsafe {
            match BITS {
                2 => bytes::<2>(from),
                3 => bytes::<3>(from),
                4 => bytes::<4>(from),
                5 => bytes::<5>(from),
                6 => bytes::<6>(from),
                _ => bytes::<8>(from),
            }
        } as u64;
        from_fn(|i| ((word >> (i * BITS)) & ((1 << BITS) - 1)) as f32)
    }

    #[inline(always)]
    unsafe fn int4_table(scale: Self::F, offset: Self::F) -> Self::Table {
        (scale, offset)
    }

    #[inline(always)]
    unsafe fn int4(from: *const u8, table: Self::Table) -> Self::F {
        // SAFETY: the caller upholds the contract.
        unsafe { Self::fma(Self::integers::<4>(from), table.0, table.1) }
    }

    #[inline(always)]
    unsafe fn e2m1_table(scale: Self::F) -> Self::Table {
        (scale, scale)
    }

    #[inline(always)]
    unsafe fn e2m1(from: *const u8, table: Self::Table) -> Self::F {
        // SAFETY: the caller upholds the contract.
        let word = unsafe { from.cast::<u32>().read_unaligned() };
        from_fn(|i| E2M1[(word >> (4 * i)) as usize & 15] * table.0[i])
    }

    #[inline(always)]
    unsafe fn e4m3(from: *const u8) -> Self::F {
        // SAFETY: the caller upholds the contract.
        let codes = unsafe { from.cast::<[u8; 8]>().read_unaligned() };
        from_fn(|i| E4M3[usize::from(codes[i])])
    }
}
