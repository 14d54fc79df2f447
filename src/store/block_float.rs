//! Floats of four and eight bits with one scale for each block: OCP microscaling, and NVIDIA's format.

use mlx_rs::ops::{clip, from_fp8, minimum, select, to_fp8};
use mlx_rs::{Array, Dtype};
use smallvec::smallvec;

use super::bits::{e8m0, from_e2m1, from_e4m3, from_e8m0, pack_nibbles, to_e2m1, unpack_nibbles};
use super::codec::{scores_in_blocks, weighted_in_blocks, Codec, MAX_IN_BLOCKS};
use super::packed::{exactly, Layout, PackedRows};
use super::planes::{self, Parts, Plane};
use crate::error::Result;
use crate::format::KvFormat;
use crate::mlx::{self, cast};

/// Block floats in MLX's layouts.
///
/// In mxfp8 and mxfp4, scales are powers of two that cover the whole range of float32. The error of an element is at
/// most 2^-4 of its magnitude in mxfp8, and half a step of E2M1 in mxfp4 and nvfp4. In nvfp4 a scale is an E4M3
/// number: values above 2688 (6 times the largest scale) are stored as the nearest value, and blocks below 0.006 as
/// zeros.
pub(super) struct BlockFloat {
    layout: Layout,
    head_dim: i32,
}

impl BlockFloat {
    /// Returns the codec; `head_dim` is a multiple of the block.
    pub fn new(layout: Layout, head_dim: i32) -> Self {
        Self { layout, head_dim }
    }

    fn block(&self) -> i32 {
        match self.layout {
            Layout::Nvfp4 => 16,
            _ => 32,
        }
    }

    /// Returns the shape of `rows` with the blocks on a separate axis.
    fn blocked_shape(&self, rows: &Array) -> Vec<i32> {
        let mut shape = rows.shape().to_vec();
        shape.truncate(3);
        shape.extend([self.head_dim / self.block(), self.block()]);
        shape
    }

    fn packed(&self, parts: &[Array]) -> Result<PackedRows> {
        let [codes, scales] = exactly::<2>(parts)?;
        Ok(PackedRows {
            layout: self.layout,
            codes: codes.clone(),
            scales: scales.clone(),
            offsets: None,
        })
    }

    /// Returns whether rows are unpacked in blocks. In a product on the CPU, MLX would unpack E4M3 by arithmetic for
    /// every row that it multiplies. This takes eight times as long as with the other layouts.
    fn in_blocks(&self) -> Result<bool> {
        Ok(self.layout == Layout::Mxfp8 && !mlx::on_gpu()?)
    }
}

impl Codec for BlockFloat {
    fn format(&self) -> KvFormat {
        match self.layout {
            Layout::Mxfp8 => KvFormat::Mxfp8,
            Layout::Nvfp4 => KvFormat::Nvfp4,
            _ => KvFormat::Mxfp4,
        }
    }

    fn head_dim(&self) -> i32 {
        self.head_dim
    }

    fn layout(&self) -> planes::Layout {
        let words = match self.layout {
            Layout::Mxfp8 => self.head_dim / 4,
            _ => self.head_dim / 8,
        };
        smallvec![
            Plane { width: words, dtype: Dtype::Uint32 },
            Plane { width: self.head_dim / self.block(), dtype: Dtype::Uint8 },
        ]
    }

    fn encode(&self, rows: &Array) -> Result<Parts> {
        let blocks = cast(rows, Dtype::Float32)?.reshape(&self.blocked_shape(rows))?;
        let peaks = blocks.abs()?.max_axis(-1, true)?;
        let [scales, inverse] = match self.layout {
            Layout::Mxfp8 => e8m0(&peaks, 8)?,
            Layout::Nvfp4 => {
                let wanted = peaks.divide(Array::from_f32(6.0))?;
                let codes = to_fp8(minimum(wanted, Array::from_f32(448.0))?)?;
                let scales = from_fp8(&codes, Dtype::Float32)?;
                // Blocks whose scale is 0 are zeros.
                let none = scales.eq(Array::from_f32(0.0))?;
                let inverse = scales.reciprocal()?;
                [codes, select(none, Array::from_f32(0.0), inverse)?]
            }
            _ => e8m0(&peaks, 2)?,
        };
        let steps = blocks.multiply(inverse)?.reshape(rows.shape())?;
        let codes = match self.layout {
            Layout::Mxfp8 => to_fp8(clip(steps, (-448.0, 448.0))?)?.view_dtype(Dtype::Uint32)?,
            _ => pack_nibbles(&to_e2m1(&steps)?)?,
        };
        Ok(smallvec![codes, scales.squeeze_axes(&[-1])?])
    }

    fn decode(&self, parts: &[Array], dtype: Dtype) -> Result<Array> {
        if mlx::on_gpu()? {
            return self.packed(parts)?.unpacked(dtype);
        }
        // MLX's CPU build composes this operation from others, which refuse some head_dims.
        let [codes, scales] = exactly::<2>(parts)?;
        let steps = match self.layout {
            Layout::Mxfp8 => from_e4m3(&codes.view_dtype(Dtype::Uint8)?)?,
            _ => from_e2m1(&unpack_nibbles(codes)?)?,
        };
        let scales = match self.layout {
            Layout::Nvfp4 => from_e4m3(scales)?,
            _ => from_e8m0(scales)?,
        };
        let rows = steps.reshape(&self.blocked_shape(codes))?.multiply(scales.expand_dims(-1)?)?;
        cast(&rows.reshape(steps.shape())?, dtype)
    }

    fn scores(&self, q: &Array, parts: &[Array]) -> Result<Array> {
        match self.in_blocks()? {
            true => scores_in_blocks(self, q, parts),
            false => self.packed(parts)?.product(q, true),
        }
    }

    fn weighted(&self, p: &Array, parts: &[Array]) -> Result<Array> {
        match self.in_blocks()? {
            true => weighted_in_blocks(self, p, parts),
            false => self.packed(parts)?.product(p, false),
        }
    }

    fn max_packed(&self) -> Result<i32> {
        match self.in_blocks()? {
            true => Ok(MAX_IN_BLOCKS),
            false => self.layout.max_packed(),
        }
    }
}
