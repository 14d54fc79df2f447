//! Vectors of float32 numbers, with an implementation for each instruction set.
//!
//! A [`Kernel`] is generic over [`Simd`]. [`Simd::enter`] runs it in a function that is compiled for the
//! instruction set, into which everything else is inlined.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(test)]
mod tests;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
pub(crate) use portable::Portable;

/// An instruction set for which kernels are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Instructions {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
    Portable,
}

impl Instructions {
    /// Returns the instruction sets of this machine, the best first.
    pub(crate) fn available() -> impl Iterator<Item = Self> {
        [
            #[cfg(target_arch = "x86_64")]
            Avx512::detected().then_some(Self::Avx512),
            #[cfg(target_arch = "x86_64")]
            Avx2::detected().then_some(Self::Avx2),
            #[cfg(target_arch = "aarch64")]
            Some(Self::Neon),
            Some(Self::Portable),
        ]
        .into_iter()
        .flatten()
    }

    pub(crate) fn best() -> Self {
        Self::available().next().unwrap_or(Self::Portable)
    }
}

/// Runs an expression with the type of an instruction set.
macro_rules! with_simd {
    ($instructions:expr, |$S:ident| $body:expr) => {{
        use $crate::simd::{self, Instructions};
        match $instructions {
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => {
                type $S = simd::Avx512;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => {
                type $S = simd::Avx2;
                $body
            }
            #[cfg(target_arch = "aarch64")]
            Instructions::Neon => {
                type $S = simd::Neon;
                $body
            }
            Instructions::Portable => {
                type $S = simd::Portable;
                $body
            }
        }
    }};
}
pub(crate) use with_simd;

/// A loop that is compiled for each instruction set. Implementations are `#[inline(always)]`.
pub(crate) trait Kernel {
    /// Runs the kernel.
    ///
    /// # Safety
    /// The machine must have the instructions of `S`, and pointers must be valid as the comments of the
    /// fields describe.
    unsafe fn run<S: Simd>(self);
}

/// The vector type of an instruction set, with the operations that kernels need.
///
/// # Safety
/// The machine must have the instructions. Pointers must be valid for the bytes that the function reads or
/// writes. They do not have to be aligned.
pub(crate) trait Simd: Copy {
    /// The number of float32 numbers in a vector: 8 or 16.
    const WIDTH: usize;
    /// The number of query rows that fit the registers in addition to four stored rows, or 0 if it is faster
    /// to unpack stored rows to memory first.
    const ROWS: usize;
    /// The number of adjacent vectors for which six rows of a product fit the registers.
    const COLS: usize;
    /// A vector.
    type F: Copy;
    /// A lookup table from codes of four bits to scaled numbers.
    type Table: Copy;

    /// Runs a kernel with these instructions.
    unsafe fn enter<K: Kernel>(kernel: K);

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(from: *const f32) -> Self::F;
    unsafe fn store(to: *mut f32, x: Self::F);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// Returns `a * b + c`.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Returns the larger number, or `b` if `b` is NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// Returns 2 to the power of the integer in the lowest nine bits of each number. The integer is from -127
    /// to 127, and the result for -127 is 0.
    unsafe fn pow2(x: Self::F) -> Self::F;
    /// Returns the sum of the numbers.
    unsafe fn sum(x: Self::F) -> f32;
    /// Returns the largest of the numbers.
    unsafe fn largest(x: Self::F) -> f32;
    /// Writes the sum of each of four vectors to `to`.
    unsafe fn sums(x: [Self::F; 4], to: *mut f32);
    /// Transposes `WIDTH` rows of `WIDTH` numbers. Strides are in numbers.
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize);

    /// Returns `WIDTH` float16 numbers.
    unsafe fn f16(from: *const u8) -> Self::F;
    /// Returns `WIDTH` bfloat16 numbers.
    unsafe fn bf16(from: *const u8) -> Self::F;
    /// Returns a vector with one float16 number in every element.
    unsafe fn splat_f16(from: *const u8) -> Self::F;
    /// Returns `WIDTH` integers of `BITS` bits, the first in the lowest bits.
    unsafe fn integers<const BITS: usize>(from: *const u8) -> Self::F;
    /// Returns the table with which [`int4`](Self::int4) multiplies by `scale` and adds `offset`.
    unsafe fn int4_table(scale: Self::F, offset: Self::F) -> Self::Table;
    /// Returns `WIDTH` integers of four bits, the first in the lowest bits.
    unsafe fn int4(from: *const u8, table: Self::Table) -> Self::F;
    /// Returns the table with which [`e2m1`](Self::e2m1) multiplies by `scale`.
    unsafe fn e2m1_table(scale: Self::F) -> Self::Table;
    /// Returns `WIDTH` E2M1 numbers, the first in the lowest bits.
    unsafe fn e2m1(from: *const u8, table: Self::Table) -> Self::F;
    /// Returns `WIDTH` E4M3 numbers.
    unsafe fn e4m3(from: *const u8) -> Self::F;
}

/// Declares operations of [`Simd`].
macro_rules! operations {
    ($(fn $name:ident $(<const $N:ident: usize>)? ($($arg:ident: $type:ty),*) $(-> $result:ty)? $body:block)+) => {$(
        #[inline(always)]
        #[allow(unused_unsafe)] // Operations without intrinsics need no block.
        unsafe fn $name $(<const $N: usize>)? ($($arg: $type),*) $(-> $result)? {
            // SAFETY: see the trait.
            unsafe { $body }
        }
    )+};
}
use operations;

/// The E2M1 numbers in the order of their codes.
pub(crate) const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The E4M3 numbers in the order of their codes. Code 127, which is NaN in the format, is 480 here: no writer
/// stores it.
pub(crate) static E4M3: [f32; 256] = {
    let mut numbers = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = ((code >> 3) & 15, code & 7);
        // 2^-9 is the smallest magnitude; powers of two are exact.
        let size = match exponent {
            0 => mantissa as f32 / 512.0,
            _ => ((8 + mantissa) << (exponent - 1)) as f32 / 512.0,
        };
        numbers[code] = if code < 128 { size } else { -size };
        code += 1;
    }
    numbers
};

/// Returns a little-endian number of `BYTES` bytes, 2 to 12.
///
/// # Safety
/// `from` must be valid for `BYTES` bytes.
#[inline(always)]
pub(crate) unsafe fn bytes<const BYTES: usize>(from: *const u8) -> u128 {
    // SAFETY: each read ends at or before `BYTES`.
    unsafe {
        let u16_at =
            |at: usize| u128::from(from.add(at).cast::<u16>().read_unaligned()) << (8 * at);
        let u32_at =
            |at: usize| u128::from(from.add(at).cast::<u32>().read_unaligned()) << (8 * at);
        let u64_at =
            |at: usize| u128::from(from.add(at).cast::<u64>().read_unaligned()) << (8 * at);
        match BYTES {
            2 => u16_at(0),
            3 => u16_at(0) | u128::from(*from.add(2)) << 16,
            4 => u32_at(0),
            5 => u32_at(0) | u128::from(*from.add(4)) << 32,
            6 => u32_at(0) | u16_at(4),
            8 => u64_at(0),
            10 => u64_at(0) | u16_at(8),
            _ => u64_at(0) | u32_at(8),
        }
    }
}

#[cfg(target_arch = "x86_64")]
/// Returns, for each integer of `bits` bits in a vector, the indices of a byte shuffle that moves its bytes
/// to an element, and the number of bits by which the element must then be shifted right.
pub(crate) const fn places<const WIDTH: usize>(bits: usize) -> ([[u8; 4]; WIDTH], [u32; WIDTH]) {
    let (mut bytes, mut shifts) = ([[0; 4]; WIDTH], [0; WIDTH]);
    let mut i = 0;
    while i < WIDTH {
        let first = i * bits / 8;
        // An integer of at most 8 bits is in one or two bytes. The index 128 clears a byte.
        bytes[i] = [first as u8, first as u8 + 1, 128, 128];
        shifts[i] = (i * bits % 8) as u32;
        i += 1;
    }
    (bytes, shifts)
}
