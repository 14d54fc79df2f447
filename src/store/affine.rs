//! Integers with a float16 scale and offset for each group: MLX's affine quantization.

use mlx_rs::ops::{clip, quantize};
use mlx_rs::{Array, Dtype};
use smallvec::smallvec;

use super::codec::{Codec, F16_MAX};
use super::packed::{exactly, Layout, PackedRows};
use super::planes::{self, Parts, Plane};
use crate::error::Result;
use crate::format::KvFormat;
use crate::mlx::cast;

/// Affine groups. MLX computes codes, scales and offsets in float32, and scales and offsets are then rounded to
/// float16.
///
/// The error of an element is at most half a step of its group. Near one end of the range of the group it is at most
/// one step: MLX fits the scale so that zero and the end of larger magnitude are exact. Rounding adds at most a 2048th
/// of the offset and of the element's distance to the offset. Elements outside the range of float16 are clamped to it,
/// so no group contains an infinity.
pub(super) struct Affine {
    bits: u8,
    group: u8,
    head_dim: i32,
}

impl Affine {
    /// Returns the codec; `head_dim` is a multiple of `group`.
    pub fn new(bits: u8, group: u8, head_dim: i32) -> Self {
        Self { bits, group, head_dim }
    }

    fn packed(&self, parts: &[Array]) -> Result<PackedRows> {
        let [codes, scales, offsets] = exactly::<3>(parts)?;
        Ok(PackedRows {
            layout: self.mlx_layout(),
            codes: codes.clone(),
            scales: scales.clone(),
            offsets: Some(offsets.clone()),
        })
    }

    fn mlx_layout(&self) -> Layout {
        Layout::Affine { bits: self.bits.into(), group: self.group.into() }
    }
}

impl Codec for Affine {
    fn format(&self) -> KvFormat {
        KvFormat::Affine { bits: self.bits, group: self.group }
    }

    fn head_dim(&self) -> i32 {
        self.head_dim
    }

    fn layout(&self) -> planes::Layout {
        let groups = self.head_dim / i32::from(self.group);
        let words = self.head_dim / 32 * i32::from(self.bits);
        smallvec![
            Plane { width: words, dtype: Dtype::Uint32 },
            Plane { width: groups, dtype: Dtype::Float16 },
            Plane { width: groups, dtype: Dtype::Float16 },
        ]
    }

    fn encode(&self, rows: &Array) -> Result<Parts> {
        let rows = clip(cast(rows, Dtype::Float32)?, (-F16_MAX, F16_MAX))?;
        let (codes, scales, offsets) = quantize(rows, i32::from(self.group), i32::from(self.bits))?;
        Ok(smallvec![codes, cast(&scales, Dtype::Float16)?, cast(&offsets, Dtype::Float16)?])
    }

    fn decode(&self, parts: &[Array], dtype: Dtype) -> Result<Array> {
        self.packed(parts)?.unpacked(dtype)
    }

    fn scores(&self, q: &Array, parts: &[Array]) -> Result<Array> {
        self.packed(parts)?.product(q, true)
    }

    fn weighted(&self, p: &Array, parts: &[Array]) -> Result<Array> {
        self.packed(parts)?.product(p, false)
    }

    fn max_packed(&self) -> Result<i32> {
        self.mlx_layout().max_packed()
    }
}
