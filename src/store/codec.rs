//! The trait of a storage format: it converts rows to planes and computes with planes.

use mlx_rs::ops::matmul;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::planes::{self, Layout, Parts, HEADS, SLOTS};
use crate::error::{fail, Result};
use crate::format::KvFormat;
use crate::mlx::{self, joined, slice_axis};

/// A storage format for rows of one `head_dim`.
pub trait Codec: Send + Sync {
    /// Returns the format.
    fn format(&self) -> KvFormat;

    /// Returns the number of elements of one row.
    fn head_dim(&self) -> i32;

    /// Returns the layout of a row's planes. Planes of zeros decode to a row of zeros.
    fn layout(&self) -> Layout;

    /// Converts rows, `[1, n_kv_heads, n, head_dim]` in any float dtype, to planes.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn encode(&self, rows: &Array) -> Result<Parts>;

    /// Converts planes to rows, `[1, n_kv_heads, n, head_dim]` in `dtype`.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn decode(&self, parts: &[Array], dtype: Dtype) -> Result<Array>;

    /// Returns the stored rows, if they are stored in `dtype`.
    fn as_dtype<'a>(&self, parts: &'a [Array], dtype: Dtype) -> Option<&'a Array> {
        parts.first().filter(|part| self.format().is_float() && part.dtype() == dtype)
    }

    /// Returns the products of `q`, `[1, n_kv_heads, m, head_dim]` in float32 or a similar dtype, with every row of
    /// these planes: `[1, n_kv_heads, m, n]`. If a format has no product over packed rows, it unpacks rows in blocks
    /// of a constant number of bytes.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn scores(&self, q: &Array, parts: &[Array]) -> Result<Array> {
        scores_in_blocks(self, q, parts)
    }

    /// Returns the sums of the rows weighted by `p`, `[1, n_kv_heads, m, n]`. The result is
    /// `[1, n_kv_heads, m, head_dim]`. Rows are unpacked as in [`scores`](Self::scores).
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn weighted(&self, p: &Array, parts: &[Array]) -> Result<Array> {
        weighted_in_blocks(self, p, parts)
    }

    /// Returns the maximum number of rows for each KV head for which [`scores`](Self::scores) and
    /// [`weighted`](Self::weighted) are faster than unpacking all rows.
    ///
    /// # Errors
    /// [`Unsupported`](crate::Status::Unsupported) if MLX cannot be started.
    fn max_packed(&self) -> Result<i32>;
}

/// The largest float16, which limits stored scales and offsets.
pub(super) const F16_MAX: f32 = 65504.0;

/// The maximum number of rows for each KV head for which unpacking in blocks is faster than unpacking whole KV heads.
pub(super) const MAX_IN_BLOCKS: i32 = 64;

/// The number of bytes of a block of unpacked rows, about the size of a CPU's caches.
const CPU_BLOCK: i64 = 4 << 20;
/// The number of bytes of a block of unpacked rows on a GPU, which waits for each block.
const GPU_BLOCK: i64 = 32 << 20;

/// Returns the numbers of KV heads and of slots of some planes.
fn size(parts: &[Array]) -> (i32, i32) {
    parts.first().map_or((0, 0), |part| (part.dim(HEADS as i32), part.dim(SLOTS as i32)))
}

/// Returns the number of slots in a block of rows that are unpacked to `dtype`.
fn block_slots(n_kv_heads: i32, head_dim: i32, dtype: Dtype) -> Result<i32> {
    let width = if dtype == Dtype::Float32 { 4 } else { 2 };
    let slot = i64::from(n_kv_heads) * i64::from(head_dim) * width;
    let block = if mlx::on_gpu()? { GPU_BLOCK } else { CPU_BLOCK };
    Ok((block / slot.max(1)).clamp(16, i64::from(i32::MAX)) as i32)
}

/// Returns the blocks of rows to unpack, as ranges. Rows that are stored in `dtype` are not unpacked, so they are one
/// block.
fn blocks<C: Codec + ?Sized>(
    codec: &C,
    parts: &[Array],
    dtype: Dtype,
) -> Result<impl Iterator<Item = (i32, i32)>> {
    let (heads, n) = size(parts);
    let step = match codec.as_dtype(parts, dtype) {
        Some(_) => n.max(1),
        None => block_slots(heads, codec.head_dim(), dtype)?,
    };
    Ok((0..n).step_by(step as usize).map(move |start| (start, start.saturating_add(step).min(n))))
}

/// Returns the rows from `start` to `stop`, unpacked.
fn block<C: Codec + ?Sized>(
    codec: &C,
    parts: &[Array],
    (start, stop): (i32, i32),
    dtype: Dtype,
) -> Result<Array> {
    codec.decode(&planes::along(parts, SLOTS, start, stop)?, dtype)
}

/// Computes [`Codec::scores`] with at most one block of unpacked rows in memory. With several blocks, each is
/// evaluated before the next: MLX would otherwise unpack all of them before it multiplies.
pub(super) fn scores_in_blocks<C: Codec + ?Sized>(
    codec: &C,
    q: &Array,
    parts: &[Array],
) -> Result<Array> {
    let mut scores: Vec<Array> = Vec::new();
    let (_, all) = size(parts);
    for (start, stop) in blocks(codec, parts, q.dtype())? {
        let block = block(codec, parts, (start, stop), q.dtype())?;
        let part = matmul(q, block.transpose_axes(&[0, 1, 3, 2])?)?;
        if stop - start < all {
            part.eval()?;
        }
        scores.push(part);
    }
    if scores.is_empty() {
        fail!(Internal, "expected at least 1 row to attend to, got none");
    }
    joined(&scores, -1)
}

/// Computes [`Codec::weighted`] with at most one block of unpacked rows in memory.
pub(super) fn weighted_in_blocks<C: Codec + ?Sized>(
    codec: &C,
    p: &Array,
    parts: &[Array],
) -> Result<Array> {
    let mut sum: Option<Array> = None;
    let (_, all) = size(parts);
    for (start, stop) in blocks(codec, parts, p.dtype())? {
        let block = block(codec, parts, (start, stop), p.dtype())?;
        let part = matmul(slice_axis(p, 3, start, stop, 1)?, block)?;
        let total = match sum {
            Some(sum) => sum.add(part)?,
            None => part,
        };
        if stop - start < all {
            eval([&total])?;
        }
        sum = Some(total);
    }
    match sum {
        Some(sum) => Ok(sum),
        None => fail!(Internal, "expected at least 1 row to attend to, got none"),
    }
}
