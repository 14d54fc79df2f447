//! MLX's packed layouts. Only this module multiplies and unpacks packed rows.

use std::ffi::CStr;

use mlx_rs::ops::repeat_axis;
use mlx_rs::{Array, Dtype};
use mlx_sys::mlx_optional_dtype;

use crate::error::{fail, Result};
use crate::mlx::{self, call, cast, joined, optional_int, slice_axis};

/// A packed layout of MLX.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// Codes of `bits` bits, with a scale and an offset for each group of `group` codes.
    Affine { bits: i32, group: i32 },
    /// E4M3 elements, with an E8M0 scale for every 32 elements.
    Mxfp8,
    /// E2M1 elements, with an E8M0 scale for every 32 elements.
    Mxfp4,
    /// E2M1 elements, with an E4M3 scale for every 16 elements.
    Nvfp4,
}

/// Codes with their scales and, in the affine layout, offsets.
#[derive(Debug, Clone)]
pub(super) struct PackedRows {
    pub layout: Layout,
    /// `[1, n_kv_heads, n, words]` of 32 bits.
    pub codes: Array,
    /// `[1, n_kv_heads, n, groups]`.
    pub scales: Array,
    /// `[1, n_kv_heads, n, groups]`.
    pub offsets: Option<Array>,
}

impl Layout {
    fn mode(self) -> &'static CStr {
        match self {
            Self::Affine { .. } => c"affine",
            Self::Mxfp8 => c"mxfp8",
            Self::Mxfp4 => c"mxfp4",
            Self::Nvfp4 => c"nvfp4",
        }
    }

    fn bits(self) -> i32 {
        match self {
            Self::Affine { bits, .. } => bits,
            Self::Mxfp8 => 8,
            Self::Mxfp4 | Self::Nvfp4 => 4,
        }
    }

    fn group(self) -> i32 {
        match self {
            Self::Affine { group, .. } => group,
            Self::Mxfp8 | Self::Mxfp4 => 32,
            Self::Nvfp4 => 16,
        }
    }

    /// Returns the maximum number of rows for each KV head for which the packed product is faster than unpacking. At
    /// this number of rows, both take the same time on two x86-64 cores; see the table of `cargo bench --bench
    /// products` in docs/performance.md. Codes of 3 and 5 bits cross byte boundaries, so each code is unpacked
    /// separately for every row.
    ///
    /// On CUDA, unpacking is faster for any number of rows. MLX also takes 16 to 59 s to compile its kernels for
    /// packed products. On an H200, with 8 KV heads of 4 bits, a token of 32 heads over 2,000 slots took 0.09 ms
    /// packed and 0.03 ms unpacked; over 32,000 slots it took 0.60 and 0.13 ms. Metal was not measured.
    pub fn max_packed(self) -> Result<i32> {
        Ok(match self {
            _ if mlx::on_gpu()? && cfg!(target_os = "macos") => 32,
            _ if mlx::on_gpu()? => 0,
            Self::Affine { bits: 3 | 5, .. } => 8,
            Self::Affine { .. } => 64,
            Self::Mxfp4 | Self::Nvfp4 => 256,
            Self::Mxfp8 => super::codec::MAX_IN_BLOCKS,
        })
    }
}

impl PackedRows {
    /// Returns the product of `x` with the rows. If `transposed`, `x` is `[1, n_kv_heads, m, head_dim]` and the rows
    /// are transposed. Otherwise `x` is `[1, n_kv_heads, m, n]`.
    ///
    /// MLX copies codes unless their rows are contiguous across all heads. A range of slots is contiguous only within
    /// a head. So a large range is multiplied head by head, without a copy.
    pub fn product(&self, x: &Array, transposed: bool) -> Result<Array> {
        let heads = self.codes.dim(1);
        let copied = if mlx::on_gpu()? { GPU_COPIED } else { CPU_COPIED };
        if heads == 1 || self.codes.nbytes() < copied {
            return self.fit_for_device()?.whole_product(x, transposed);
        }
        let products = (0..heads)
            .map(|head| {
                let of = |array: &Array| slice_axis(array, 1, head, head + 1, 1);
                let packed = Self {
                    layout: self.layout,
                    codes: of(&self.codes)?,
                    scales: of(&self.scales)?,
                    offsets: self.offsets.as_ref().map(of).transpose()?,
                };
                packed.fit_for_device()?.whole_product(&of(x)?, transposed)
            })
            .collect::<Result<Vec<_>>>()?;
        joined(&products, 1)
    }

    fn whole_product(&self, x: &Array, transposed: bool) -> Result<Array> {
        let (group, bits) = (optional_int(self.layout.group()), optional_int(self.layout.bits()));
        // SAFETY: an empty handle means an absent array and owns nothing.
        let none = unsafe { mlx_sys::mlx_array_new() };
        let offsets = self.offsets.as_ref().map_or(none, Array::as_ptr);
        // SAFETY: the handles outlive the call.
        call(|made, stream| unsafe {
            mlx_sys::mlx_quantized_matmul(
                made,
                x.as_ptr(),
                self.codes.as_ptr(),
                self.scales.as_ptr(),
                offsets,
                transposed,
                group,
                bits,
                self.layout.mode().as_ptr(),
                stream,
            )
        })
    }

    /// Returns all rows in `dtype`.
    pub fn unpacked(&self, dtype: Dtype) -> Result<Array> {
        let (group, bits) = (optional_int(self.layout.group()), optional_int(self.layout.bits()));
        // The affine layout decodes to the dtype of its scales.
        let (scales, offsets) = match &self.offsets {
            Some(offsets) if dtype != offsets.dtype() => {
                (cast(&self.scales, Dtype::Float32)?, Some(cast(offsets, Dtype::Float32)?))
            }
            offsets => (self.scales.clone(), offsets.clone()),
        };
        let wanted = match offsets {
            Some(_) => scales.dtype(),
            None => dtype,
        };
        let wanted = mlx_optional_dtype { value: wanted.into(), has_value: true };
        // SAFETY: empty handles mean absent arrays and own nothing.
        let (none, no_scale) = unsafe { (mlx_sys::mlx_array_new(), mlx_sys::mlx_array_new()) };
        let offsets = offsets.as_ref().map_or(none, Array::as_ptr);
        // SAFETY: the handles outlive the call.
        let rows = call(|made, stream| unsafe {
            mlx_sys::mlx_dequantize(
                made,
                self.codes.as_ptr(),
                scales.as_ptr(),
                offsets,
                group,
                bits,
                self.layout.mode().as_ptr(),
                no_scale,
                wanted,
                stream,
            )
        })?;
        cast(&rows, dtype)
    }

    /// Returns the same codes in a memory layout that the device can multiply.
    ///
    /// On CUDA, MLX 0.32.2 has kernels only for codes with contiguous rows, and throws for others. So a range of slots
    /// of several heads is copied; a range of a single head is not. MLX's kernel for rows of one group gives wrong
    /// results for several rows of 8 bits, so a single group is split into two groups with the same scale.
    fn fit_for_device(&self) -> Result<Self> {
        if !mlx::on_gpu()? || cfg!(target_os = "macos") {
            return Ok(self.clone());
        }
        let mut fit = self.clone();
        if let (Layout::Affine { bits, group: group @ (64 | 128) }, Some(offsets), 1) =
            (fit.layout, &fit.offsets, fit.scales.dim(-1))
        {
            fit.offsets = Some(repeat_axis::<half::f16>(offsets.clone(), 2, -1)?);
            fit.scales = repeat_axis::<half::f16>(fit.scales, 2, -1)?;
            fit.layout = Layout::Affine { bits, group: group / 2 };
        }
        if fit.codes.dim(1) > 1 {
            fit.codes = fit.codes.contiguous()?;
        }
        // The scales must be copied even if they repeat or broadcast a single scale.
        fit.scales = fit.scales.contiguous()?;
        fit.offsets = fit.offsets.as_ref().map(Array::contiguous).transpose()?;
        Ok(fit)
    }
}

/// The maximum number of bytes of codes for which, on the CPU, one copy is cheaper than a product for each head.
const CPU_COPIED: usize = 64 << 10;
/// The same limit on a GPU.
const GPU_COPIED: usize = 1 << 20;

/// Returns the planes as an array of exactly `N`.
pub(super) fn exactly<const N: usize>(parts: &[Array]) -> Result<&[Array; N]> {
    match parts.try_into() {
        Ok(planes) => Ok(planes),
        Err(_) => fail!(Internal, "expected {N} planes of rows, got {}", parts.len()),
    }
}
