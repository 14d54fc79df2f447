//! Rows in float32, float16 or bfloat16, with one plane.

use super::row_codec::{RowCodec, Widths};
use crate::floats::{store_bf16, store_f16, store_f32};
use crate::tensor::Dtype;

/// The codec of a float dtype. Values outside the range of float16 become infinite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Float {
    F32,
    F16,
    Bf16,
}

impl Float {
    /// Returns the dtype whose rows are stored without conversion.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::F16 => Dtype::F16,
            Self::Bf16 => Dtype::Bf16,
        }
    }
}

impl RowCodec for Float {
    fn widths(&self, head_dim: usize) -> Widths {
        [head_dim * self.dtype().size(), 0, 0]
    }

    fn encode(&self, row: &[f32], [elements, ..]: [&mut [u8]; 3]) {
        match self {
            Self::F32 => store_f32(row, elements),
            Self::F16 => store_f16(row, elements),
            Self::Bf16 => store_bf16(row, elements),
        }
    }

    fn decode(&self, [elements, ..]: [&[u8]; 3], row: &mut [f32]) {
        self.dtype().load(elements, row);
    }

    fn infinite_from(&self) -> u32 {
        match self {
            Self::F32 => f32::INFINITY.to_bits(),
            // Half a step above the largest value. This tie is rounded to even, which is infinity.
            Self::F16 => 65520f32.to_bits(),
            Self::Bf16 => 0x7f7f_8000,
        }
    }
}
