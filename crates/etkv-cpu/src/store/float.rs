//! Rows in float32, float16 or bfloat16, with one plane.

use super::row_codec::{RowCodec, Widths};
use crate::tensor::Dtype;

/// The codec of a float dtype. Values outside the range of float16 become infinite.
impl RowCodec for Dtype {
    fn widths(&self, head_dim: usize) -> Widths {
        [head_dim * self.size(), 0, 0]
    }

    fn encode(&self, row: &[f32], [elements, ..]: [&mut [u8]; 3]) {
        self.store(row, elements);
    }

    fn decode(&self, [elements, ..]: [&[u8]; 3], row: &mut [f32]) {
        self.load(elements, row);
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
