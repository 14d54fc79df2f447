//! TurboQuant stores a vector as codes of 4 bits, two per byte, and a norm.

use mlx_rs::{Array, Dtype};

use super::{bytes, expect_dtype, expect_float, expect_shape, leading, or, shl, with};
use crate::error::{fail, Result};
use etkv::mlx::{cast, slice_axis};

/// The number of boundaries between codes.
pub const BOUNDARIES: i32 = 15;

/// The number of codes.
const CODES: usize = 16;

/// Converts values `[..., dim]` to codes `[..., dim / 2]`. A code is the number of boundaries below a value, 0 for a
/// NaN.
pub fn compress(values: &Array, boundaries: &Array, dtype: Dtype) -> Result<Array> {
    expect_dtype("values", values, dtype)?;
    expect_float("boundaries", boundaries)?;
    expect_shape("boundaries", boundaries, &[BOUNDARIES])?;
    let last = values.shape().last().copied().unwrap_or(0);
    let leading = leading("values", values, last)?;
    if last < 2 || last % 2 != 0 {
        fail!(Program, "expected `values` of an even number of elements, got {:?}", values.shape());
    }
    let above = values.expand_dims(-1)?.gt(boundaries)?;
    let codes = above.sum_axis(-1, false)?.as_dtype(Dtype::Uint8)?;
    let pairs = codes.reshape(&with(leading, &[last / 2, 2]))?;
    let axis = leading.len() + 1;
    let half = |at| slice_axis(&pairs, axis, at, at + 1, 1);
    let packed = or(&shl(&half(0)?, &bytes(&[4]))?, &half(1)?)?;
    Ok(packed.reshape(&with(leading, &[last / 2]))?)
}

/// Converts codes `[..., dim / 2]` and norms `[..., 1]` to vectors `[..., dim]`.
pub fn dequantize(
    codes: &Array,
    norms: &Array,
    centroids: &Array,
    dtype: Dtype,
    dim: i32,
) -> Result<Array> {
    expect_dtype("packed", codes, Dtype::Uint8)?;
    expect_dtype("norms", norms, dtype)?;
    expect_float("centroids", centroids)?;
    expect_shape("centroids", centroids, &[CODES as i32])?;
    let leading = leading("packed", codes, dim / 2)?;
    expect_shape("norms", norms, &with(leading, &[1]))?;
    // The two centroids of each byte.
    let pairs: Vec<u8> = (0..=u8::MAX).flat_map(|byte| [byte >> 4, byte & 15]).collect();
    let pairs = Array::from_slice(&pairs, &[256, 2]);
    let table = cast(centroids, dtype)?.take_axis(pairs, 0)?;
    let values = table.take_axis(codes, 0)?.reshape(&with(leading, &[dim]))?;
    Ok(values.multiply(norms)?)
}

/// Returns the norms, `[..., 1]`, of vectors `[..., dim]`.
pub fn norm(x: &Array, dtype: Dtype, dim: i32) -> Result<Array> {
    expect_dtype("x", x, dtype)?;
    leading("x", x, dim)?;
    let squares = cast(x, Dtype::Float32)?.square()?.sum_axis(-1, true)?;
    cast(&squares.sqrt()?, dtype)
}
