//! Storage of a cache's rows in MLX arrays.
//!
//! [`MlxStore`] is the storage of a cache. Each layer has a pool for its keys and a pool for its values. A pool has
//! slots and a format, but no notion of positions, sequences or steps.
//!
//! A format is a [`Codec`]: the planes of a row, and the computations with them. Pools of all formats keep their
//! planes in buffers of the same kind.

mod affine;
mod bits;
mod block_float;
mod bytes;
mod codec;
mod finite;
mod first;
mod float;
mod kv_view;
mod mask;
mod mlx_store;
mod packed;
mod planes;
mod row;

pub use codec::Codec;
pub(crate) use float::float_dtype;
pub use kv_view::{KvView, StoredRows};
pub use mlx_store::MlxStore;
pub use planes::regions::Piece;

use std::sync::Arc;

use mlx_rs::ops::zeros_dtype;
use mlx_rs::{Array, Dtype};

use crate::error::{fail, Result};
use crate::format::KvFormat;
use block_float::BlockFloat;
use etkv_core::bookkeeping::Slots;
use planes::Parts;
use row::{Element, Row};

/// The rows of one layer's keys, or of its values, in slots.
///
/// Rows are shaped `[1, n_kv_heads, n, head_dim]`. Slots that were never written are zero.
struct Pool {
    codec: Arc<dyn Codec>,
    n_kv_heads: i32,
    layout: planes::Layout,
    /// One buffer for each plane, or none if the pool has no slots. There are no other handles of the buffers, so
    /// writes happen in place.
    buffers: Parts,
    /// The frozen rows of the first slots. The first slot of the buffers follows these slots.
    pieces: Vec<Piece>,
    /// The number of first slots that other pools may read too.
    shared: i32,
}

impl Pool {
    /// Returns a pool without slots, for rows of `head_dim` elements in `n_kv_heads` heads.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if rows of `head_dim` elements do not fit
    /// the format.
    fn new(format: KvFormat, n_kv_heads: i32, head_dim: i32) -> Result<Self> {
        let codec = codec_for(format, head_dim)?;
        let (layout, buffers, pieces) = (codec.layout(), Parts::new(), Vec::new());
        Ok(Self { codec, n_kv_heads, layout, buffers, pieces, shared: 0 })
    }

    /// Returns the format of the rows.
    fn format(&self) -> KvFormat {
        self.codec.format()
    }

    /// Returns the number of elements of one row.
    fn head_dim(&self) -> i32 {
        self.codec.head_dim()
    }

    /// Writes rows to these slots, in place. The slots must be allocated and distinct.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn write(&mut self, slots: &Slots, rows: &Array) -> Result<()> {
        let expected = [1, self.n_kv_heads, slots.len() as i32, self.head_dim()];
        if rows.shape() != expected {
            fail!(Shape, "expected rows of shape {expected:?}, got {:?}", rows.shape());
        }
        if slots.is_empty() {
            return Ok(());
        }
        self.write_parts(slots, &self.codec.encode(rows)?)
    }

    /// Returns a view of the slots from `start` to `stop`, for attention. If only some of these slots are frozen, the
    /// rows are copied for the view. The copy is freed with the view.
    ///
    /// The view holds the buffers: a write before the view is dropped copies all of them.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn read(&self, start: i32, stop: i32) -> Result<KvView> {
        let parts = self.slice(start, stop)?;
        Ok(KvView { codec: Arc::clone(&self.codec), parts, in_keys: false })
    }

    /// Returns bitwise copies of these slots. There must be at least one slot. Evaluate them before the next
    /// write.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn copy(&self, slots: &Slots) -> Result<StoredRows> {
        Ok(StoredRows { format: self.format(), parts: self.copied_parts(slots)? })
    }

    /// Writes copies to these slots. The numbers of slots and of copies must be equal.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn put(&mut self, slots: &Slots, rows: &StoredRows) -> Result<()> {
        if rows.format != self.format() || rows.len() != slots.len() {
            fail!(
                Internal,
                "cannot write {} rows of {} to {} slots of {}",
                rows.len(),
                rows.format,
                slots.len(),
                self.format()
            );
        }
        self.write_parts(slots, &rows.parts)
    }

    /// Writes copies back to slots that an open step may have overwritten. Slots that are still frozen are skipped:
    /// the step did not write them.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn restore(&mut self, slots: &Slots, rows: &StoredRows) -> Result<()> {
        if rows.format != self.format() {
            fail!(Internal, "cannot write rows of {} to slots of {}", rows.format, self.format());
        }
        self.write_unfrozen(slots, &rows.parts)
    }

    /// Zeroes slots that an open step may have written. Slots that are still frozen are skipped: the step did not
    /// write them.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn blank(&mut self, slots: &Slots) -> Result<()> {
        let shape = [1, self.n_kv_heads, slots.len() as i32, self.head_dim()];
        let zeros = self.codec.encode(&zeros_dtype(&shape, Dtype::Float32)?)?;
        self.write_unfrozen(slots, &zeros)
    }
}

fn codec_for(format: KvFormat, head_dim: i32) -> Result<Arc<dyn Codec>> {
    format.check(head_dim)?;
    Ok(match format {
        KvFormat::F32 | KvFormat::F16 | KvFormat::Bf16 => {
            Arc::new(float::Float::new(format, head_dim)?)
        }
        KvFormat::Affine { bits, group } => Arc::new(affine::Affine::new(bits, group, head_dim)),
        KvFormat::Mxfp8 => Arc::new(BlockFloat::new(packed::Layout::Mxfp8, head_dim)),
        KvFormat::Mxfp4 => Arc::new(BlockFloat::new(packed::Layout::Mxfp4, head_dim)),
        KvFormat::Nvfp4 => Arc::new(BlockFloat::new(packed::Layout::Nvfp4, head_dim)),
        KvFormat::RowInt4 => Arc::new(Row::new(Element::Int4, head_dim)),
        KvFormat::RowFp4 => Arc::new(Row::new(Element::Fp4, head_dim)),
    })
}

/// The number of slots that are converted together.
const CONVERTED_SLOTS: i32 = 1024;

/// Converts a pool's rows to another format. Slots at or after `used` become zero.
///
/// Unpacks blocks of 1024 slots. The old and the new pool are both in memory until the last rows are evaluated.
///
/// # Errors
/// - [`InvalidArgument`](crate::Status::InvalidArgument) if the rows do not fit the format.
/// - [`Backend`](crate::Status::Backend); the pool is unchanged.
fn convert(pool: &mut Pool, format: KvFormat, used: i32) -> Result<()> {
    if pool.format() == format {
        return Ok(());
    }
    let mut converted = Pool::new(format, pool.n_kv_heads, pool.head_dim())?;
    converted.grow(pool.slots())?;
    // MLX divides by the number of elements of a row, and the second pool of a layer may have rows without elements.
    let used = if pool.head_dim() == 0 { 0 } else { used.min(pool.slots()) };
    let mut start = 0;
    while start < used {
        let stop = start.saturating_add(CONVERTED_SLOTS).min(used);
        let rows = pool.read(start, stop)?.dequantized(Dtype::Float32)?;
        converted.write(&Slots::Run(start..stop), &rows)?;
        mlx_rs::transforms::eval(converted.buffers())?;
        start = stop;
    }
    *pool = converted;
    Ok(())
}

#[cfg(test)]
mod tests;
