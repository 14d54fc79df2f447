//! Rows in float32, float16 or bfloat16: one plane, of the rows themselves.

use mlx_rs::{Array, Dtype};
use smallvec::smallvec;

use super::codec::{Codec, MOST_IN_BLOCKS};
use super::planes::{Layout, Parts, Plane};
use crate::error::{fail, Result};
use crate::format::KvFormat;
use crate::mlx::cast;

/// Rows in a float dtype. What does not fit float16 becomes infinite.
#[derive(Debug)]
pub(super) struct Float {
    format: KvFormat,
    dtype: Dtype,
    head_dim: i32,
}

impl Float {
    /// The codec of a float format.
    pub fn new(format: KvFormat, head_dim: i32) -> Result<Self> {
        let dtype = match format {
            KvFormat::F32 => Dtype::Float32,
            KvFormat::F16 => Dtype::Float16,
            KvFormat::Bf16 => Dtype::Bfloat16,
            other => fail!(Internal, "{other} is no float format"),
        };
        Ok(Self { format, dtype, head_dim })
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
            _ => fail!(Internal, "{} planes of float rows", parts.len()),
        }
    }

    fn most_packed(&self) -> Result<i32> {
        Ok(MOST_IN_BLOCKS)
    }
}
