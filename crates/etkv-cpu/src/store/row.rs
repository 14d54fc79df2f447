//! Elements of four bits, integers or E2M1, with a float16 scale for each row.

use half::f16;

use super::bits::{pack_nibbles, rounded, to_byte, to_e2m1, unpack_nibbles};
use super::row_codec::{RowCodec, Widths};
use crate::floats::{peak, to_f16};
use crate::simd::E2M1;

/// The codec of rows of 4-bit codes with a scale. A word of 32 bits has eight codes, with the first in the
/// lowest bits.
///
/// Codes are computed with the scale after its rounding to float16. The scale is at most 65504. Values above
/// 7 times (`Int4`) or 6 times (`Fp4`) this scale are clipped.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Row {
    /// Integers from -8 to 7, stored with 8 added. The largest magnitude of a row becomes 7.
    Int4,
    /// E2M1 numbers. The largest magnitude of a row becomes 6.
    Fp4,
}

/// The number of elements that are converted at a time.
const BLOCK: usize = 64;

/// The largest float16.
const F16_MAX: f32 = 65504.0;

impl Row {
    fn scale(&self, row: &[f32]) -> f16 {
        let most = match self {
            Self::Int4 => 7.0,
            Self::Fp4 => 6.0,
        };
        let scale = f32::from_bits(peak(row)) / most;
        // NaN stays NaN.
        to_f16(if scale > F16_MAX { F16_MAX } else { scale })
    }
}

/// Returns the code of an integer.
fn to_int4(step: f32) -> u8 {
    // NaN gets the lowest code.
    let step = if step >= -8.0 { step.min(7.0) } else { -8.0 };
    to_byte(rounded(step) + 8.0)
}

impl RowCodec for Row {
    fn widths(&self, head_dim: usize) -> Widths {
        [head_dim / 2, 2, 0]
    }

    fn encode(&self, row: &[f32], [codes, scale_out, _]: [&mut [u8]; 3]) {
        let stored = self.scale(row);
        scale_out.copy_from_slice(&stored.to_le_bytes());
        // A row of zeros has scale 0, so its codes do not matter.
        let scale = if stored.to_f32() == 0.0 { 1.0 } else { stored.to_f32() };
        for (values, codes) in row.chunks(BLOCK).zip(codes.chunks_mut(BLOCK / 2)) {
            let mut apart = [0; BLOCK];
            let apart = &mut apart[..values.len()];
            let steps = apart.iter_mut().zip(values);
            match self {
                Self::Int4 => steps.for_each(|(code, value)| *code = to_int4(value / scale)),
                Self::Fp4 => steps.for_each(|(code, value)| *code = to_e2m1(value / scale)),
            }
            pack_nibbles(apart, codes);
        }
    }

    fn decode(&self, [codes, scale, _]: [&[u8]; 3], row: &mut [f32]) {
        let scale = f16::from_le_bytes([scale[0], scale[1]]).to_f32();
        match self {
            Self::Int4 => unpack_nibbles(codes, row, |code| (f32::from(code) - 8.0) * scale),
            Self::Fp4 => unpack_nibbles(codes, row, |code| E2M1[usize::from(code & 15)] * scale),
        }
    }
}
