//! Packed weights, and MLX's operations on them.

use std::ffi::CStr;
use std::ops::Range;

use mlx_rs::{Array, Dtype};

use super::calls::none;
use super::limits::check_size;
use crate::error::Result;
use crate::ir::{Packing, PackingMode};
use etkv::kernels::{unpack, AffineWeights};
use etkv::mlx::{self, call, cast, optional_int, slice_axis};

impl Packing {
    /// Returns MLX's name.
    pub fn name(self) -> &'static CStr {
        match self.mode {
            PackingMode::Affine => c"affine",
            PackingMode::Mxfp4 => c"mxfp4",
            PackingMode::Mxfp8 => c"mxfp8",
            PackingMode::Nvfp4 => c"nvfp4",
        }
    }
}

/// Returns the handle of an array, or an empty one.
pub fn handle(array: Option<&Array>) -> mlx_sys::mlx_array {
    array.map_or_else(none, Array::as_ptr)
}

/// Returns rows in a layout that MLX's products accept. If the axis of a single row was added by a view, the
/// row also has the strides of a column, and MLX treats it as a column. A kernel for NVIDIA GPUs then reads
/// 16 bytes at an unaligned address.
pub fn as_rows(rows: Array) -> Result<Array> {
    match *rows.shape() {
        [.., 1, _] => Ok(rows.reshape(&[rows.size() as i32])?.reshape(rows.shape())?),
        _ => Ok(rows),
    }
}

/// A packed matrix `[out, in]`, or several.
#[derive(Debug, Clone)]
pub struct Weights {
    w: Array,
    scales: Array,
    biases: Option<Array>,
    packing: Packing,
}

impl Weights {
    pub fn new([w, scales]: [&Array; 2], biases: Option<&Array>, packing: Packing) -> Self {
        Self { w: w.clone(), scales: scales.clone(), biases: biases.cloned(), packing }
    }

    /// Whether all parts are matrices, or stacks with the same number of axes.
    pub fn are_matrices(&self) -> bool {
        let axes = self.w.ndim();
        let parts = [Some(&self.scales), self.biases.as_ref()];
        axes >= 2 && parts.into_iter().flatten().all(|part| part.ndim() == axes)
    }

    /// Whether the weights are one matrix.
    pub fn are_one_matrix(&self) -> bool {
        self.w.ndim() == 2
    }

    /// The dtype of the scales.
    pub fn dtype(&self) -> Dtype {
        self.scales.dtype()
    }

    /// Returns the same weights with scales and biases in float32.
    pub fn in_float32(&self) -> Result<Self> {
        let wide = |part| cast(part, Dtype::Float32);
        let biases = self.biases.as_ref().map(wide).transpose()?;
        Ok(Self { scales: wide(&self.scales)?, biases, ..self.clone() })
    }

    /// The axes before those of a matrix.
    pub fn leading(&self) -> &[i32] {
        self.w.shape().split_last_chunk::<2>().map_or(&[], |(leading, _)| leading)
    }

    /// The outputs of a matrix.
    pub fn outputs(&self) -> i32 {
        self.w.shape().iter().rev().nth(1).copied().unwrap_or(0)
    }

    fn map(&self, each: impl Fn(&Array) -> Result<Array>) -> Result<Self> {
        let biases = self.biases.as_ref().map(&each).transpose()?;
        Ok(Self { w: each(&self.w)?, scales: each(&self.scales)?, biases, packing: self.packing })
    }

    /// Returns the matrices along one axis: `[matrices, out, in]`.
    pub fn stacked(&self) -> Result<Self> {
        self.map(|part| Ok(part.reshape(&[-1, part.dim(-2), part.dim(-1)])?))
    }

    /// Returns one matrix of `[matrices, out, in]`.
    pub fn matrix(&self, index: i32) -> Result<Self> {
        self.map(|part| Ok(slice_axis(part, 0, index, index + 1, 1)?.squeeze_axes(&[0])?))
    }

    /// Returns the weights of some outputs.
    pub fn of_outputs(&self, outputs: Range<i32>) -> Result<Self> {
        self.map(|part| {
            slice_axis(part, part.ndim().saturating_sub(2), outputs.start, outputs.end, 1)
        })
    }

    /// Returns the weights in `dtype`. Scales and biases are applied in float32, and the result is rounded once: in
    /// half precision the error would be three times as large.
    pub fn unpacked(&self, dtype: Dtype) -> Result<Array> {
        if let Some(made) = self.unpacked_by_kernel(dtype)? {
            return Ok(made);
        }
        let (wide, of_result) = match self.packing.mode {
            PackingMode::Affine => (self.in_float32()?, Dtype::Float32),
            _ => (self.clone(), dtype),
        };
        let Packing { group_size, bits, .. } = self.packing;
        // SAFETY: the arrays outlive the call.
        let made = call(|made, stream| unsafe {
            mlx_sys::mlx_dequantize(
                made,
                wide.w.as_ptr(),
                wide.scales.as_ptr(),
                handle(wide.biases.as_ref()),
                optional_int(group_size),
                optional_int(bits),
                wide.packing.name().as_ptr(),
                none(),
                mlx_sys::mlx_optional_dtype { value: of_result.into(), has_value: true },
                stream,
            )
        })?;
        cast(&made, dtype)
    }

    fn unpacked_by_kernel(&self, dtype: Dtype) -> Result<Option<Array>> {
        let (PackingMode::Affine, Some(biases)) = (self.packing.mode, &self.biases) else {
            return Ok(None);
        };
        let Packing { group_size, bits, .. } = self.packing;
        let (codes, scales) = (&self.w, &self.scales);
        let weights = AffineWeights { codes, scales, biases, bits, group_size };
        let Some(shape) = weights.unpacked_shape(dtype) else {
            return Ok(None);
        };
        // The first launch of a kernel is not lazy, so the size of its result is checked before the launch.
        check_size(&shape, dtype)?;
        unpack(&weights, dtype)
    }

    /// Whether a row has a single group.
    pub fn has_one_group(&self) -> bool {
        self.scales.shape().last() == Some(&1)
    }

    /// Returns the dtype of products with `x`: that of `x`, unless the scales have another dtype.
    pub fn product_dtype(&self, x: &Array) -> Dtype {
        match self.packing.mode {
            PackingMode::Affine if self.scales.dtype() != x.dtype() => Dtype::Float32,
            _ => x.dtype(),
        }
    }

    /// Calls `product` with `x`. On a CPU, MLX's products of half precision with packed floats take 15 to 30 times as
    /// long as in float32, so `x` is then float32.
    fn widened(&self, x: &Array, product: impl FnOnce(&Array) -> Result<Array>) -> Result<Array> {
        let is_half = matches!(x.dtype(), Dtype::Float16 | Dtype::Bfloat16);
        if self.packing.mode == PackingMode::Affine || !is_half || mlx::is_stream_on_gpu()? {
            return product(x);
        }
        cast(&product(&cast(x, Dtype::Float32)?)?, x.dtype())
    }

    /// Returns MLX's product of `x` with the weights. `transpose` multiplies by rows of the weights.
    pub fn product(&self, x: &Array, transpose: bool) -> Result<Array> {
        let Packing { group_size, bits, .. } = self.packing;
        let product = |x: &Array| {
            // SAFETY: the arrays outlive the call.
            call(|made, stream| unsafe {
                mlx_sys::mlx_quantized_matmul(
                    made,
                    x.as_ptr(),
                    self.w.as_ptr(),
                    self.scales.as_ptr(),
                    handle(self.biases.as_ref()),
                    transpose,
                    optional_int(group_size),
                    optional_int(bits),
                    self.packing.name().as_ptr(),
                    stream,
                )
            })
        };
        self.widened(x, product)
    }

    /// Returns MLX's products of matrices of `x` with matrices of the weights, which indices select. Indices are
    /// uint32.
    pub fn gathered(
        &self,
        x: &Array,
        [lhs, rhs]: [Option<&Array>; 2],
        transpose: bool,
        sorted: bool,
    ) -> Result<Array> {
        let Packing { group_size, bits, .. } = self.packing;
        let product = |x: &Array| {
            // SAFETY: the arrays outlive the call.
            call(|made, stream| unsafe {
                mlx_sys::mlx_gather_qmm(
                    made,
                    x.as_ptr(),
                    self.w.as_ptr(),
                    self.scales.as_ptr(),
                    handle(self.biases.as_ref()),
                    handle(lhs),
                    handle(rhs),
                    transpose,
                    optional_int(group_size),
                    optional_int(bits),
                    self.packing.name().as_ptr(),
                    sorted,
                    stream,
                )
            })
        };
        self.widened(x, product)
    }
}
