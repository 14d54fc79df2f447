//! Codes of four bits with one float16 scale for each row: integers, or E2M1.

use mlx_rs::ops::{broadcast_to, clip, full, maximum, select};
use mlx_rs::{Array, Dtype};
use smallvec::smallvec;

use super::bits::{from_e2m1, pack_nibbles, to_e2m1, unpack_nibbles};
use super::codec::{scores_in_blocks, weighted_in_blocks, Codec, F16_MAX};
use super::packed::{exactly, Layout, PackedRows};
use super::planes::{self, Parts, Plane};
use crate::error::Result;
use crate::format::KvFormat;
use crate::mlx::cast;

/// The codes of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Element {
    /// Integers from -8 to 7, stored with 8 added. The scale maps the largest magnitude of a row to 7.
    Int4,
    /// E2M1 numbers. The scale maps the largest magnitude of a row to 6.
    Fp4,
}

/// Rows of 4-bit codes and a scale. A word of 32 bits has eight codes, the first in the lowest bits.
///
/// The error of an element is at most half a step. For integers, a step is the scale. For E2M1, a step grows with the
/// magnitude: it is half the scale, the scale or twice the scale. Codes are computed with the rounded scale, a
/// float16 of at most 65504. Values above 7 times that scale (6 times for E2M1) are stored as the nearest value.
pub(super) struct Row {
    element: Element,
    head_dim: i32,
}

impl Row {
    /// Returns the codec; `head_dim` is a multiple of 8.
    pub fn new(element: Element, head_dim: i32) -> Self {
        Self { element, head_dim }
    }

    /// Returns the rows in a packed layout of MLX, or `None` if `head_dim` is not a multiple of 32. Integers have the
    /// affine layout, with the scale of the row and an offset of -8 times the scale. E2M1 elements have the mxfp4
    /// layout, with scales of 1.
    fn packed(&self, codes: &Array, scales: &Array) -> Result<Option<PackedRows>> {
        let Some(group) = [128, 64, 32].into_iter().find(|group| self.head_dim % group == 0) else {
            return Ok(None);
        };
        let mut shape = scales.shape().to_vec();
        let (layout, scales, offsets) = match self.element {
            Element::Int4 => {
                shape[3] = self.head_dim / group;
                let scales = cast(scales, Dtype::Float32)?;
                let offsets = scales.multiply(Array::from_f32(-8.0))?;
                let offsets = broadcast_to(offsets, &shape)?;
                (Layout::Affine { bits: 4, group }, broadcast_to(scales, &shape)?, Some(offsets))
            }
            Element::Fp4 => {
                shape[3] = self.head_dim / 32;
                let ones = full::<u8>(&shape, Array::from_slice(&[127u8], &[1]))?;
                (Layout::Mxfp4, ones, None)
            }
        };
        Ok(Some(PackedRows { layout, codes: codes.clone(), scales, offsets }))
    }
}

impl Codec for Row {
    fn format(&self) -> KvFormat {
        match self.element {
            Element::Int4 => KvFormat::RowInt4,
            Element::Fp4 => KvFormat::RowFp4,
        }
    }

    fn head_dim(&self) -> i32 {
        self.head_dim
    }

    fn layout(&self) -> planes::Layout {
        smallvec![
            Plane { width: self.head_dim / 8, dtype: Dtype::Uint32 },
            Plane { width: 1, dtype: Dtype::Float16 },
        ]
    }

    fn encode(&self, rows: &Array) -> Result<Parts> {
        let rows = cast(rows, Dtype::Float32)?;
        let most = match self.element {
            Element::Int4 => 7.0,
            Element::Fp4 => 6.0,
        };
        let peaks = rows.abs()?.max_axis(-1, true)?;
        let scales = clip(peaks.divide(Array::from_f32(most))?, ((), F16_MAX))?;
        let stored = cast(&scales, Dtype::Float16)?;
        let scales = cast(&stored, Dtype::Float32)?;
        // A row of zeros has scale 0 and arbitrary codes.
        let none = scales.eq(Array::from_f32(0.0))?;
        let steps = rows.divide(select(none, Array::from_f32(1.0), &scales)?)?;
        let codes = match self.element {
            Element::Fp4 => to_e2m1(&steps)?,
            Element::Int4 => {
                let shifted = clip(steps.round(None)?, (-8.0, 7.0))?.add(Array::from_f32(8.0))?;
                // A NaN gets the lowest code, because it has no integer.
                let shifted = maximum(shifted, Array::from_f32(0.0))?;
                crate::mlx::bits::and(
                    &cast(&shifted, Dtype::Uint32)?,
                    &Array::from_slice(&[15u32], &[1]),
                )?
            }
        };
        Ok(smallvec![pack_nibbles(&codes)?, stored])
    }

    fn decode(&self, parts: &[Array], dtype: Dtype) -> Result<Array> {
        let [codes, scales] = exactly::<2>(parts)?;
        let codes = unpack_nibbles(codes)?;
        let steps = match self.element {
            Element::Int4 => cast(&codes, Dtype::Float32)?.subtract(Array::from_f32(8.0))?,
            Element::Fp4 => from_e2m1(&codes)?,
        };
        cast(&steps.multiply(cast(scales, Dtype::Float32)?)?, dtype)
    }

    fn scores(&self, q: &Array, parts: &[Array]) -> Result<Array> {
        let [codes, scales] = exactly::<2>(parts)?;
        let Some(packed) = self.packed(codes, scales)? else {
            return scores_in_blocks(self, q, parts);
        };
        let scores = packed.product(q, true)?;
        match self.element {
            Element::Int4 => Ok(scores),
            Element::Fp4 => Ok(scores.multiply(by_slot(scales, q.dtype())?)?),
        }
    }

    fn weighted(&self, p: &Array, parts: &[Array]) -> Result<Array> {
        let [codes, scales] = exactly::<2>(parts)?;
        let Some(packed) = self.packed(codes, scales)? else {
            return weighted_in_blocks(self, p, parts);
        };
        match self.element {
            Element::Int4 => packed.product(p, false),
            Element::Fp4 => packed.product(&p.multiply(by_slot(scales, p.dtype())?)?, false),
        }
    }

    fn max_packed(&self) -> Result<i32> {
        match self.head_dim % 32 {
            0 => Layout::Mxfp4.max_packed(),
            _ => Ok(super::codec::MAX_IN_BLOCKS),
        }
    }
}

/// Returns the scales of rows, `[1, n_kv_heads, n, 1]`, as `[1, n_kv_heads, 1, n]`.
fn by_slot(scales: &Array, dtype: Dtype) -> Result<Array> {
    Ok(cast(scales, dtype)?.transpose_axes(&[0, 1, 3, 2])?)
}
