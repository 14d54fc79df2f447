//! Floats of four and eight bits with a scale for each block: the microscaling formats of OCP, and NVFP4 of
//! NVIDIA.

use super::bits::{e8m0, from_e8m0, pack_nibbles, to_e2m1, to_e4m3, unpack_nibbles};
use super::row_codec::{RowCodec, Widths};
use crate::floats::peak;
use crate::simd::{E2M1, E4M3};

/// The codec of block floats. In mxfp8 and mxfp4, scales are powers of two and cover the range of float32. In
/// nvfp4, the scale is an E4M3 number: magnitudes above 2688 (6 times the largest scale) are clipped, and
/// blocks with a maximum below 0.006 become zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockFloat {
    /// E4M3 elements, with an E8M0 scale for every 32.
    Mxfp8,
    /// E2M1 elements, with an E8M0 scale for every 32.
    Mxfp4,
    /// E2M1 elements, with an E4M3 scale for every 16.
    Nvfp4,
}

/// The maximum number of elements of a block.
const MAX: usize = 32;

impl BlockFloat {
    fn block(&self) -> usize {
        match self {
            Self::Nvfp4 => 16,
            _ => 32,
        }
    }

    /// Returns the bytes of the codes of `n` elements.
    fn code_bytes(&self, n: usize) -> usize {
        match self {
            Self::Mxfp8 => n,
            _ => n / 2,
        }
    }

    /// Returns the code of a block's scale, and the inverse of the scale.
    fn fit(&self, block: &[f32]) -> (u8, f32) {
        let peak = peak(block);
        match self {
            Self::Mxfp8 => e8m0(peak, 8),
            Self::Mxfp4 => e8m0(peak, 2),
            Self::Nvfp4 => {
                let code = to_e4m3(f32::from_bits(peak) / 6.0);
                let scale = E4M3[usize::from(code)];
                // All elements of a block with scale 0 become 0.
                (code, if scale == 0.0 { 0.0 } else { 1.0 / scale })
            }
        }
    }
}

impl RowCodec for BlockFloat {
    fn widths(&self, head_dim: usize) -> Widths {
        [self.code_bytes(head_dim), head_dim / self.block(), 0]
    }

    fn encode(&self, row: &[f32], [codes, scales, _]: [&mut [u8]; 3]) {
        let block = self.block();
        let codes = codes.chunks_exact_mut(self.code_bytes(block));
        for ((values, codes), scale) in row.chunks_exact(block).zip(codes).zip(scales) {
            let inverse;
            (*scale, inverse) = self.fit(values);
            if *self == Self::Mxfp8 {
                for (code, &value) in codes.iter_mut().zip(values) {
                    *code = to_e4m3(value * inverse);
                }
            } else {
                let mut apart = [0; MAX];
                for (code, &value) in apart.iter_mut().zip(values) {
                    *code = to_e2m1(value * inverse);
                }
                pack_nibbles(&apart[..block], codes);
            }
        }
    }

    fn decode(&self, [codes, scales, _]: [&[u8]; 3], row: &mut [f32]) {
        let block = self.block();
        let codes = codes.chunks_exact(self.code_bytes(block));
        for ((row, codes), &scale) in row.chunks_exact_mut(block).zip(codes).zip(scales) {
            let scale = match self {
                Self::Nvfp4 => E4M3[usize::from(scale)],
                _ => from_e8m0(scale),
            };
            if *self == Self::Mxfp8 {
                for (out, &code) in row.iter_mut().zip(codes) {
                    *out = E4M3[usize::from(code)] * scale;
                }
            } else {
                unpack_nibbles(codes, row, |code| E2M1[usize::from(code & 15)] * scale);
            }
        }
    }
}
