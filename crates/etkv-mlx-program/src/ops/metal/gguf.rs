//! Weights of GGUF files: super-blocks of 256 elements, with a scale for each 32 or 16 elements.
//!
//! | format | bytes of a super-block |
//! | --- | --- |
//! | Q4_K | scale, scale of minima (float16 each), 12 of scales and minima, 128 of codes |
//! | Q5_K | as Q4_K, with 32 of the fifth bits before the codes |
//! | Q6_K | 128 of the lower bits, 64 of the upper ones, 16 scales, scale (float16) |
//!
//! A weight stays packed in memory. Each product unpacks it in parts that fit a processor's caches.

use std::ops::Range;

use mlx_rs::ops::{concatenate, matmul};
use mlx_rs::{Array, Dtype};

use super::{and, bytes, expect_dtype, expect_float, expect_shape, leading, or, shl, shr, with};
use crate::error::{fail, Result};
use crate::ir::Gguf;
use etkv::mlx::{cast, slice_axis};

/// The number of elements of a super-block.
pub const BLOCK: i32 = 256;

/// The maximum elements of a weight that are unpacked together. On a CPU they take 2 MB in float32, so they
/// stay in its caches. On a GPU the maximum is 512 MB, because each part costs kernel launches.
const PART: i64 = 1 << 19;
const PART_ON_GPU: i64 = 1 << 27;

impl Gguf {
    /// Returns the number of bytes of a super-block.
    fn block_bytes(self) -> i32 {
        match self {
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }
}

/// Refuses a weight whose shape is not `rows` by `features`. Returns the number of rows.
fn check_weight(weight: &Array, format: Gguf, rows: Option<i32>, features: i32) -> Result<i32> {
    expect_dtype("weight", weight, Dtype::Uint8)?;
    // A row cannot be longer than the weight.
    let row = i64::from(features / BLOCK) * i64::from(format.block_bytes());
    match *weight.shape() {
        [n, bytes] if i64::from(bytes) == row && rows.is_none_or(|rows| rows == n) => Ok(n),
        _ => {
            let rows = rows.map_or_else(|| String::from("rows"), |rows| rows.to_string());
            fail!(Program, "expected `weight` of shape [{rows}, {row}], got {:?}", weight.shape())
        }
    }
}

/// A linear layer.
pub struct Linear {
    pub format: Gguf,
    pub dtype: Dtype,
    pub out: Dtype,
    pub outputs: i32,
    pub features: i32,
}

impl Linear {
    /// Returns `x`, `[..., features]`, times the weight's rows, plus `bias`: `[..., outputs]`.
    pub fn run(
        &self,
        x: &Array,
        weight: &Array,
        bias: Option<&Array>,
        on_gpu: bool,
    ) -> Result<Array> {
        expect_dtype("x", x, self.dtype)?;
        let leading = leading("x", x, self.features)?;
        check_weight(weight, self.format, Some(self.outputs), self.features)?;
        if let Some(bias) = bias {
            expect_float("bias", bias)?;
            expect_shape("bias", bias, &[self.outputs])?;
        }
        // On a CPU half precision is an order of magnitude slower than float32.
        let dtype = if on_gpu { self.dtype } else { Dtype::Float32 };
        let rows = leading.iter().try_fold(1i32, |rows, &size| rows.checked_mul(size));
        let Some(rows) = rows else {
            fail!(Program, "expected `x` of at most {} rows, got {leading:?}", i32::MAX);
        };
        let x = cast(x, dtype)?.reshape(&[rows, self.features])?;
        let columns = x.transpose_axes(&[1, 0])?.contiguous()?;
        let part = if on_gpu { PART_ON_GPU } else { PART };
        let step = (part / i64::from(self.features)).clamp(1, i64::from(i32::MAX)) as i32;
        let made = self.product(&columns, weight, step)?;
        let made = match bias {
            Some(bias) => made.add(bias)?,
            None => made,
        };
        Ok(cast(&made, self.out)?.reshape(&with(leading, &[self.outputs]))?)
    }

    /// Returns the outputs, `[rows of x, outputs]`. Unpacks `step` rows of the weight at a time.
    ///
    /// The parts are not computed in parallel: BLAS itself uses several threads, which would wait for each other.
    fn product(&self, columns: &Array, weight: &Array, step: i32) -> Result<Array> {
        let parts = (0..self.outputs).step_by(step as usize).map(|start| {
            let stop = self.outputs.min(start.saturating_add(step));
            let part = unpacked(&slice_axis(weight, 0, start, stop, 1)?, self.format)?;
            // The weight is the left factor, in its stored layout. BLAS would traverse a right factor along its short
            // side.
            Ok(matmul(cast(&part, columns.dtype())?, columns)?)
        });
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let made = match &parts[..] {
            [one] => one.clone(),
            parts => concatenate(parts, 0)?,
        };
        Ok(made.transpose_axes(&[1, 0])?)
    }
}

/// Returns the rows of a weight at `indices`, which must be in range: `[..., features]`.
pub fn embedding(
    weight: &Array,
    indices: &Array,
    format: Gguf,
    out: Dtype,
    features: i32,
    rows: Option<i32>,
) -> Result<Array> {
    check_weight(weight, format, rows, features)?;
    if !matches!(indices.dtype(), Dtype::Int32 | Dtype::Int64) {
        expect_dtype("indices", indices, Dtype::Int64)?;
    }
    let shape = with(indices.shape(), &[features]);
    let taken = weight.take_axis(indices.flatten(None, None)?, 0)?;
    Ok(cast(&unpacked(&taken, format)?, out)?.reshape(&shape)?)
}

/// Returns the elements of rows `[n, bytes]` in float32, `[n, features]`.
fn unpacked(rows: &Array, format: Gguf) -> Result<Array> {
    let (n, per_row) = (rows.dim(0), rows.dim(1) / format.block_bytes());
    let blocks = Blocks { bytes: rows.reshape(&[n, per_row, format.block_bytes()])? };
    let elements = match format {
        Gguf::Q4K => blocks.affine(&blocks.nibbles(16..144, 32)?)?,
        Gguf::Q5K => {
            let low = blocks.nibbles(48..176, 32)?;
            let high = shl(&blocks.fields(16..48, 1, 1)?, &bytes(&[4]))?;
            blocks.affine(&or(&low, &high)?)?
        }
        Gguf::Q6K => {
            let low = blocks.nibbles(0..128, 64)?;
            let high = shl(&blocks.fields(128..192, 2, 2)?, &bytes(&[4]))?;
            blocks.symmetric(&or(&low, &high)?)?
        }
    };
    Ok(elements.reshape(&[n, per_row * BLOCK])?)
}

/// Super-blocks, `[rows, blocks, bytes]`.
struct Blocks {
    bytes: Array,
}

impl Blocks {
    /// Returns a range of the bytes of each super-block, reshaped to these axes.
    fn part(&self, range: Range<i32>, axes: &[i32]) -> Result<Array> {
        let part = slice_axis(&self.bytes, 2, range.start, range.end, 1)?;
        Ok(part.reshape(&with(&self.bytes.shape()[..2], axes))?)
    }

    /// Returns a scale of each super-block in float32, `[rows, blocks, 1]`.
    fn scale(&self, at: i32) -> Result<Array> {
        let scale = self.part(at..at + 2, &[2])?.view_dtype(Dtype::Float16)?;
        cast(&scale, Dtype::Float32)
    }

    /// Returns 128 bytes as 256 elements of 4 bits. The elements of each `run` bytes are first the low halves, then
    /// the high halves.
    fn nibbles(&self, range: Range<i32>, run: i32) -> Result<Array> {
        let part = self.part(range, &[128 / run, 1, run])?;
        let halves = [and(&part, &bytes(&[15]))?, shr(&part, &bytes(&[4]))?];
        self.flat(&concatenate(&halves, 3)?)
    }

    /// Returns bytes as 256 elements of `bits` bits, in `runs` runs. The elements of a run are first the lowest bits
    /// of all its bytes, then the next bits.
    fn fields(&self, range: Range<i32>, bits: u8, runs: i32) -> Result<Array> {
        let n = (range.end - range.start) / runs;
        let part = self.part(range, &[runs, 1, n])?;
        let shifts: Vec<u8> = (0..8 / bits).map(|field| field * bits).collect();
        let apart = shr(&part, &bytes(&shifts).reshape(&[-1, 1])?)?;
        self.flat(&and(&apart, &bytes(&[(1 << bits) - 1]))?)
    }

    /// Reshapes elements to `[rows, blocks, 256]`.
    fn flat(&self, elements: &Array) -> Result<Array> {
        Ok(elements.reshape(&with(&self.bytes.shape()[..2], &[BLOCK]))?)
    }

    /// Returns codes in groups that share a scale, `[rows, blocks, 256 / size, size]`, in float32.
    fn groups(&self, codes: &Array, size: i32) -> Result<Array> {
        let groups = codes.reshape(&with(&self.bytes.shape()[..2], &[BLOCK / size, size]))?;
        cast(&groups, Dtype::Float32)
    }

    /// Returns codes times the scales of their groups of 32, minus the minima of the groups.
    fn affine(&self, codes: &Array) -> Result<Array> {
        // There are eight scales and eight minima of six bits. The last four of each have their lower four bits in
        // the last four bytes, and their upper two bits in the first eight bytes.
        let [a, b, c] = [4..8, 8..12, 12..16].map(|range| self.part(range, &[4]));
        let (a, b, c) = (a?, b?, c?);
        let six = |bytes_of| and(bytes_of, &bytes(&[63]));
        let upper = |bytes_of| shl(&shr(bytes_of, &bytes(&[6]))?, &bytes(&[4]));
        let scales = [six(&a)?, or(&and(&c, &bytes(&[15]))?, &upper(&a)?)?];
        let minima = [six(&b)?, or(&shr(&c, &bytes(&[4]))?, &upper(&b)?)?];
        let of_groups = |parts: &[Array], at| -> Result<Array> {
            let parts = cast(&concatenate(parts, 2)?, Dtype::Float32)?;
            Ok(self.scale(at)?.multiply(parts)?.expand_dims(-1)?)
        };
        let scaled = self.groups(codes, 32)?.multiply(of_groups(&scales, 0)?)?;
        Ok(scaled.subtract(of_groups(&minima, 2)?)?)
    }

    /// Returns codes minus 32, times the scales of their groups of 16.
    fn symmetric(&self, codes: &Array) -> Result<Array> {
        let scales = cast(&self.part(192..208, &[16])?.view_dtype(Dtype::Int8)?, Dtype::Float32)?;
        let scales = self.scale(208)?.multiply(scales)?.expand_dims(-1)?;
        let codes = self.groups(codes, 16)?.subtract(Array::from_f32(32.0))?;
        Ok(codes.multiply(scales)?)
    }
}
