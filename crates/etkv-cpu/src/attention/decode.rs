//! Unpacks stored rows in registers. There is a type for each layout of codes and scales.

use etkv_core::{fail, KvFormat, Result};

use crate::simd::{Simd, E4M3};

/// One row of one KV head: the address of its bytes in each plane.
pub(super) type Row = [*const u8; 3];

/// Reads the rows of a storage format.
pub(super) trait Decode: Copy {
    /// The bits of an element in the first plane.
    const BITS: usize;

    /// The factor and the offset of a group, broadcast to vectors.
    type Scale<S: Simd>: Copy;

    /// Returns the number of elements that share a scale, in rows of `dim` elements.
    fn group(self, dim: usize) -> usize;

    /// Returns the scale of group `group`.
    ///
    /// # Safety
    /// The same as for [`Simd`], and the row must have this group.
    unsafe fn scale<S: Simd>(self, row: Row, group: usize) -> Self::Scale<S>;

    /// Returns a vector of elements from `at`, which is a multiple of the vector width. All of them belong to
    /// the group of `scale`.
    ///
    /// # Safety
    /// The same as for [`Simd`], and the row must have these elements.
    unsafe fn load<S: Simd>(self, row: Row, at: usize, scale: Self::Scale<S>) -> S::F;
}

/// Unpacked elements.
macro_rules! floats {
    ($($(#[$doc:meta])* $name:ident: $bits:literal, $load:expr;)+) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub(super) struct $name;

        impl Decode for $name {
            const BITS: usize = $bits;
            type Scale<S: Simd> = ();

            #[inline(always)]
            fn group(self, dim: usize) -> usize {
                dim
            }

            #[inline(always)]
            unsafe fn scale<S: Simd>(self, _row: Row, _group: usize) {}

            #[inline(always)]
            unsafe fn load<S: Simd>(self, row: Row, at: usize, (): ()) -> S::F {
                // SAFETY: the caller upholds the contract.
                unsafe { $load(row[0].add(at * ($bits / 8))) }
            }
        }
    )+};
}

floats! {
    /// Float32.
    F32: 32, |from: *const u8| S::load(from.cast());
    /// Float16.
    F16: 16, S::f16;
    /// Bfloat16.
    Bf16: 16, S::bf16;
}

/// Integers of `BITS` bits with a float16 scale and offset for every `group` elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct Affine<const BITS: usize> {
    pub group: usize,
}

impl<const BITS: usize> Decode for Affine<BITS> {
    const BITS: usize = BITS;
    type Scale<S: Simd> = (S::F, S::F);

    #[inline(always)]
    fn group(self, _dim: usize) -> usize {
        self.group
    }

    #[inline(always)]
    unsafe fn scale<S: Simd>(self, row: Row, group: usize) -> Self::Scale<S> {
        // SAFETY: the caller upholds the contract.
        unsafe { (S::splat_f16(row[1].add(2 * group)), S::splat_f16(row[2].add(2 * group))) }
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(self, row: Row, at: usize, scale: Self::Scale<S>) -> S::F {
        // SAFETY: the caller upholds the contract. The vector width is a multiple of 8, so the element starts at
        // a byte boundary.
        unsafe { S::fma(S::integers::<BITS>(row[0].add(at / 8 * BITS)), scale.0, scale.1) }
    }
}

/// Integers of four bits with a float16 scale and offset for every `group` elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct Affine4 {
    pub group: usize,
}

impl Decode for Affine4 {
    const BITS: usize = 4;
    type Scale<S: Simd> = S::Table;

    #[inline(always)]
    fn group(self, _dim: usize) -> usize {
        self.group
    }

    #[inline(always)]
    unsafe fn scale<S: Simd>(self, row: Row, group: usize) -> Self::Scale<S> {
        // SAFETY: the caller upholds the contract.
        unsafe {
            let scale = S::splat_f16(row[1].add(2 * group));
            S::int4_table(scale, S::splat_f16(row[2].add(2 * group)))
        }
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(self, row: Row, at: usize, scale: Self::Scale<S>) -> S::F {
        // SAFETY: the caller upholds the contract.
        unsafe { S::int4(row[0].add(at / 2), scale) }
    }
}

/// Codes with one scale for each group.
macro_rules! scaled {
    ($($(#[$doc:meta])* $name:ident: $bits:literal, $group:expr, $scale:ty, $of:expr, $load:expr;)+) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub(super) struct $name;

        impl Decode for $name {
            const BITS: usize = $bits;
            type Scale<S: Simd> = $scale;

            #[inline(always)]
            fn group(self, dim: usize) -> usize {
                $group(dim)
            }

            #[inline(always)]
            unsafe fn scale<S: Simd>(self, row: Row, group: usize) -> Self::Scale<S> {
                // SAFETY: the caller upholds the contract.
                unsafe { $of(row[1], group) }
            }

            #[inline(always)]
            unsafe fn load<S: Simd>(self, row: Row, at: usize, scale: Self::Scale<S>) -> S::F {
                // SAFETY: the caller upholds the contract.
                unsafe { $load(row[0].add(at / 8 * $bits), scale) }
            }
        }
    )+};
}

scaled! {
    /// E4M3 elements with an E8M0 scale for every 32.
    Mxfp8: 8, |_| 32, S::F, e8m0::<S>, |from, scale| S::mul(S::e4m3(from), scale);
    /// E2M1 elements with an E8M0 scale for every 32.
    Mxfp4: 4, |_| 32, S::Table, |from, group| S::e2m1_table(e8m0::<S>(from, group)), S::e2m1;
    /// E2M1 elements with an E4M3 scale for every 16.
    Nvfp4: 4, |_| 16, S::Table, |from, group| S::e2m1_table(e4m3::<S>(from, group)), S::e2m1;
    /// E2M1 elements with a float16 scale for the row.
    RowFp4: 4, |dim| dim, S::Table, |from, _| S::e2m1_table(S::splat_f16(from)), S::e2m1;
    /// Integers of four bits with 8 added, and a float16 scale for the row.
    RowInt4: 4, |dim| dim, S::Table, |from, _| row_int4::<S>(from), S::int4;
}

#[inline(always)]
unsafe fn row_int4<S: Simd>(scale: *const u8) -> S::Table {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let scale = S::splat_f16(scale);
        S::int4_table(scale, S::mul(scale, S::splat(-8.0)))
    }
}

#[inline(always)]
unsafe fn e8m0<S: Simd>(scales: *const u8, group: usize) -> S::F {
    // SAFETY: the caller upholds the contract.
    unsafe { S::splat(f32::from_bits(u32::from(*scales.add(group)) << 23)) }
}

#[inline(always)]
unsafe fn e4m3<S: Simd>(scales: *const u8, group: usize) -> S::F {
    // SAFETY: the caller upholds the contract.
    unsafe { S::splat(E4M3[usize::from(*scales.add(group))]) }
}

/// The formats that attention reads, one variant for each compiled loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    F32,
    F16,
    Bf16,
    Affine2(usize),
    Affine3(usize),
    Affine4(usize),
    Affine5(usize),
    Affine6(usize),
    Affine8(usize),
    Mxfp8,
    Mxfp4,
    Nvfp4,
    RowInt4,
    RowFp4,
}

impl Encoding {
    /// Returns how rows of `format` are read, and the number of its planes.
    ///
    /// # Errors
    /// [`Unsupported`](etkv_core::Status::Unsupported), naming the format, if attention does not read it.
    pub fn of(format: KvFormat) -> Result<(Self, usize)> {
        Ok(match format {
            KvFormat::F32 => (Self::F32, 1),
            KvFormat::F16 => (Self::F16, 1),
            KvFormat::Bf16 => (Self::Bf16, 1),
            KvFormat::Affine { bits, group } => {
                let group = usize::from(group);
                let encoding = match bits {
                    2 => Self::Affine2(group),
                    3 => Self::Affine3(group),
                    4 => Self::Affine4(group),
                    5 => Self::Affine5(group),
                    6 => Self::Affine6(group),
                    8 => Self::Affine8(group),
                    _ => fail!(Unsupported, "attention on the CPU does not read {format}"),
                };
                (encoding, 3)
            }
            KvFormat::Mxfp8 => (Self::Mxfp8, 2),
            KvFormat::Mxfp4 => (Self::Mxfp4, 2),
            KvFormat::Nvfp4 => (Self::Nvfp4, 2),
            KvFormat::RowInt4 => (Self::RowInt4, 2),
            KvFormat::RowFp4 => (Self::RowFp4, 2),
        })
    }
}

/// Runs an expression with the [`Decode`] of an [`Encoding`].
macro_rules! with_decode {
    ($encoding:expr, |$decode:ident| $body:expr) => {{
        use $crate::attention::decode::{self, Encoding};
        macro_rules! run {
            ($value:expr) => {{
                let $decode = $value;
                $body
            }};
        }
        match $encoding {
            Encoding::F32 => run!(decode::F32),
            Encoding::F16 => run!(decode::F16),
            Encoding::Bf16 => run!(decode::Bf16),
            Encoding::Affine2(group) => run!(decode::Affine::<2> { group }),
            Encoding::Affine3(group) => run!(decode::Affine::<3> { group }),
            Encoding::Affine4(group) => run!(decode::Affine4 { group }),
            Encoding::Affine5(group) => run!(decode::Affine::<5> { group }),
            Encoding::Affine6(group) => run!(decode::Affine::<6> { group }),
            Encoding::Affine8(group) => run!(decode::Affine::<8> { group }),
            Encoding::Mxfp8 => run!(decode::Mxfp8),
            Encoding::Mxfp4 => run!(decode::Mxfp4),
            Encoding::Nvfp4 => run!(decode::Nvfp4),
            Encoding::RowInt4 => run!(decode::RowInt4),
            Encoding::RowFp4 => run!(decode::RowFp4),
        }
    }};
}
pub(super) use with_decode;
