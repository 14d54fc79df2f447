//! Rows in float32, float16 or bfloat16. They have a single plane: the rows themselves.

use mlx_rs::{Array, Dtype};
use smallvec::smallvec;

use super::codec::{Codec, MAX_IN_BLOCKS};
use super::planes::{Layout, Parts, Plane};
use crate::error::{fail, Result};
use crate::format::KvFormat;
use crate::mlx::cast;

/// Rows in a float dtype. Values outside the range of float16 become infinite.
#[derive(Debug)]
pub(super) struct Float {
    format: KvFormat,
    dtype: Dtype,
    head_dim: i32,
}

impl Float {
    /// Returns the codec of a float format.
    pub fn new(format: KvFormat, head_dim: i32) -> Result<Self> {
        match float_dtype(format) {
            Some(dtype) => Ok(Self { format, dtype, head_dim }),
            None => fail!(Internal, "expected a float format, got {format}"),
        }
    }
}

/// Returns the dtype of the rows of a float format.
pub fn float_dtype(format: KvFormat) -> Option<Dtype> {
    match format {
        KvFormat::F32 => Some(Dtype::Float32),
        KvFormat::F16 => Some(Dtype::Float16),
        KvFormat::Bf16 => Some(Dtype::Bfloat16),
        _ => None,
    }
}

impl Codec for Float {
    fn format(&self) -> KvFormat {
        self.format
    }

    fn head_dim(&self) -> i32 {
        self.head_dim
    }

    fn layout(&self) -> Layout {
        smallvec![Plane { width: self.head_dim, dtype: self.dtype }]
    }

    fn encode(&self, rows: &Array) -> Result<Parts> {
        Ok(smallvec![cast(rows, self.dtype)?])
    }

    fn decode(&self, parts: &[Array], dtype: Dtype) -> Result<Array> {
        match parts {
            [rows] => cast(rows, dtype),
            _ => fail!(Internal, "expected 1 plane of float rows, got {}", parts.len()),
        }
    }

    fn max_packed(&self) -> Result<i32> {
        Ok(MAX_IN_BLOCKS)
    }
}
