//! Vectors of float32 numbers, one implementation for each instruction set.
//!
//! A [`Kernel`] is written once, over [`Simd`]. [`Simd::enter`] runs it in a function that is compiled with
//! the instructions of the set; everything below is inlined.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
pub(crate) use portable::Portable;

/// An instruction set that kernels are compiled for.
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
    /// Runs it.
    ///
    /// # Safety
    /// The machine has the instructions of `S`, and the fields point to what their comments say.
    unsafe fn run<S: Simd>(self);
}

/// One vector of an instruction set, and the operations that kernels need.
///
/// # Safety
/// All functions need a machine that has the instructions. Pointers must be valid for the bytes that the
/// function reads or writes; they need no alignment.
pub(crate) trait Simd: Copy {
    /// Float32 numbers in a vector: 8 or 16.
    const WIDTH: usize;
    /// The number of query rows that fit the registers next to four stored rows; 0 if it is faster to unpack
    /// stored rows to memory first.
    const ROWS: usize;
    /// The number of adjacent vectors that fit the registers for six rows of a product.
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
    /// Returns the larger, and `b` if `b` is NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// Returns 2 to the power of the integer in the lowest nine bits of each number, -127 to 127; 0 for -127.
    unsafe fn pow2(x: Self::F) -> Self::F;
    /// Returns the sum of the numbers.
    unsafe fn sum(x: Self::F) -> f32;
    /// Returns the largest of the numbers.
    unsafe fn largest(x: Self::F) -> f32;
    /// Writes the sums of four vectors to four numbers.
    unsafe fn sums(x: [Self::F; 4], to: *mut f32);
    /// Transposes `WIDTH` rows of `WIDTH` numbers. Strides are in numbers.
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize);

    /// Returns `WIDTH` float16 numbers.
    unsafe fn f16(from: *const u8) -> Self::F;
    /// Returns `WIDTH` bfloat16 numbers.
    unsafe fn bf16(from: *const u8) -> Self::F;
    /// Returns one float16 number in every element of the vector.
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
/// There are `BYTES` bytes at `from`.
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
/// For integer `i` of a vector, of `bits` bits: the bytes that hold it, as four indices of a byte shuffle,
/// and the number of bits to shift them right.
pub(crate) const fn places<const WIDTH: usize>(bits: usize) -> ([[u8; 4]; WIDTH], [u32; WIDTH]) {
    let (mut bytes, mut shifts) = ([[0; 4]; WIDTH], [0; WIDTH]);
    let mut i = 0;
    while i < WIDTH {
        let first = i * bits / 8;
        // An integer of at most 8 bits lies in two bytes; the others are cleared (128).
        bytes[i] = [first as u8, first as u8 + 1, 128, 128];
        shifts[i] = (i * bits % 8) as u32;
        i += 1;
    }
    (bytes, shifts)
}
