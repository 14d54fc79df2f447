//! What a storage format is to a pool: how rows become planes, and what can be
//! computed from planes.

use mlx_rs::ops::{concatenate, matmul};
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::planes::{Layout, Parts};
use super::rows::Rows;
use crate::error::{fail, Result};
use crate::format::KvFormat;
use crate::mlx::{self, slice_axis};

/// A storage format for rows of one head_dim.
pub trait Codec: Send + Sync {
    /// The format.
    fn format(&self) -> KvFormat;

    /// Elements of one row.
    fn head_dim(&self) -> i32;

    /// What is kept of a row. A row of zeros in every plane is a row of zeros.
    fn layout(&self) -> Layout;

    /// Rows, `[1, n_kv_heads, n, head_dim]` in any float dtype, as planes.
    ///
    /// # Errors
    /// [`Mlx`](crate::Status::Mlx).
    fn encode(&self, rows: &Array) -> Result<Parts>;

    /// Planes as rows, `[1, n_kv_heads, n, head_dim]` in `dtype`.
    ///
    /// # Errors
    /// [`Mlx`](crate::Status::Mlx).
    fn decode(&self, parts: &[Array], dtype: Dtype) -> Result<Array>;

    /// `Rows::scores`. Where the format has no product of its own, rows are
    /// unpacked in blocks of a constant number of bytes.
    ///
    /// # Errors
    /// [`Mlx`](crate::Status::Mlx).
    fn scores(&self, q: &Array, rows: &Rows) -> Result<Array> {
        scores_in_blocks(q, rows)
    }

    /// `Rows::weighted`, likewise.
    ///
    /// # Errors
    /// [`Mlx`](crate::Status::Mlx).
    fn weighted(&self, p: &Array, rows: &Rows) -> Result<Array> {
        weighted_in_blocks(p, rows)
    }

    /// The most rows a KV head for which [`scores`](Self::scores) and
    /// [`weighted`](Self::weighted) are better than unpacking all.
    ///
    /// # Errors
    /// [`Unsupported`](crate::Status::Unsupported) where MLX cannot be started.
    fn most_packed(&self) -> Result<i32>;
}

/// The largest float16, which no stored scale and offset goes beyond.
pub(super) const F16_MAX: f32 = 65504.0;

/// The most rows a KV head for which unpacking in blocks is better than unpacking
/// one KV head at a time.
pub(super) const MOST_IN_BLOCKS: i32 = 64;

/// Bytes of rows that are unpacked at a time: what a CPU's caches hold.
const CPU_BLOCK: i64 = 4 << 20;
/// Likewise on a GPU, which waits for each block.
const GPU_BLOCK: i64 = 32 << 20;

/// Slots of a block of rows that are unpacked to `dtype`.
fn block_slots(rows: &Rows, dtype: Dtype) -> Result<i32> {
    let width = if dtype == Dtype::Float32 { 4 } else { 2 };
    let slot = i64::from(rows.n_kv_heads()) * i64::from(rows.head_dim()) * width;
    let block = if mlx::on_gpu()? { GPU_BLOCK } else { CPU_BLOCK };
    Ok((block / slot.max(1)).clamp(16, i64::from(i32::MAX)) as i32)
}

/// Rows that are stored in `dtype` are one block: they are not unpacked.
fn blocks(rows: &Rows, dtype: Dtype) -> Result<impl Iterator<Item = (i32, i32)>> {
    let n = rows.len();
    let step = if rows.as_dtype(dtype).is_some() { n.max(1) } else { block_slots(rows, dtype)? };
    Ok((0..n).step_by(step as usize).map(move |start| (start, start.saturating_add(step).min(n))))
}

/// `Rows::scores` with no more than a block of rows unpacked at a time. With
/// more than one, each is evaluated before the next: MLX would unpack them all
/// before it multiplies.
pub(super) fn scores_in_blocks(q: &Array, rows: &Rows) -> Result<Array> {
    let mut scores: Vec<Array> = Vec::new();
    let all = rows.len();
    for (start, stop) in blocks(rows, q.dtype())? {
        let block = rows.slice(start, stop)?.dequantized(q.dtype())?;
        let part = matmul(q, block.transpose_axes(&[0, 1, 3, 2])?)?;
        if stop - start < all {
            part.eval()?;
        }
        scores.push(part);
    }
    match scores.len() {
        0 => fail!(Internal, "attention over no rows"),
        1 => Ok(scores.swap_remove(0)),
        _ => Ok(concatenate(&scores, -1)?),
    }
}

/// `Rows::weighted`, likewise.
pub(super) fn weighted_in_blocks(p: &Array, rows: &Rows) -> Result<Array> {
    let mut sum: Option<Array> = None;
    let all = rows.len();
    for (start, stop) in blocks(rows, p.dtype())? {
        let block = rows.slice(start, stop)?.dequantized(p.dtype())?;
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
        None => fail!(Internal, "attention over no rows"),
    }
}
