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
use planes::Planes;
use row::{Element, Row};

/// The rows of one layer's keys, or of its values, in slots.
///
/// Rows are shaped `[1, n_kv_heads, n, head_dim]`. Slots that were never written are zero.
pub trait Pool: Send {
    /// Returns the format of the rows.
    fn format(&self) -> KvFormat;

    /// Returns the number of KV heads.
    fn n_kv_heads(&self) -> i32;

    /// Returns the number of elements of one row.
    fn head_dim(&self) -> i32;

    /// Returns the number of allocated slots.
    fn slots(&self) -> i32;

    /// Grows to `slots` slots and keeps the rows; never shrinks. The old and the new buffers are both in memory until
    /// the rows are copied.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); the pool is unchanged.
    fn grow(&mut self, slots: i32) -> Result<()>;

    /// Writes rows to these slots, in place. The slots must be allocated and distinct.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn write(&mut self, slots: &Slots, rows: &Array) -> Result<()>;

    /// Returns a view of the slots from `start` to `stop`, for attention. If only some of these slots are frozen, the
    /// rows are copied for the view. The copy is freed with the view.
    ///
    /// The view holds the buffers: a write before the view is dropped copies all of them.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn read(&self, start: i32, stop: i32) -> Result<KvView>;

    /// Returns bitwise copies of these slots. There must be at least one slot. Evaluate them before the next
    /// write.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn copy(&self, slots: &Slots) -> Result<StoredRows>;

    /// Writes copies to these slots. The numbers of slots and of copies must be equal.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn put(&mut self, slots: &Slots, rows: &StoredRows) -> Result<()>;

    /// Writes copies back to slots that an open step may have overwritten. Slots that are still frozen are skipped:
    /// the step did not write them.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn restore(&mut self, slots: &Slots, rows: &StoredRows) -> Result<()>;

    /// Zeroes slots that an open step may have written. Slots that are still frozen are skipped: the step did not
    /// write them.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn blank(&mut self, slots: &Slots) -> Result<()>;

    /// Returns the number of frozen slots. These are the first slots, and the buffers begin after them.
    fn base(&self) -> i32;

    /// Returns the number of first slots that other pools may read too.
    fn shared(&self) -> i32;

    /// Makes the rows of the first `end` slots read-only. With `anew`, also copies rows that are read-only already. A
    /// write to such a slot first copies its row, and all frozen rows after it, to the pool's own buffers.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); the pool is unchanged.
    fn freeze(&mut self, end: i32, anew: bool) -> Result<()>;

    /// Returns the frozen rows of the first `end` slots, for other pools.
    fn share(&mut self, end: i32) -> Vec<Piece>;

    /// Makes a pool without slots read frozen rows of its format as its first slots.
    ///
    /// # Errors
    /// [`Internal`](crate::Status::Internal) for rows of another format, or a pool with slots.
    fn attach(&mut self, pieces: &[Piece]) -> Result<()>;

    /// Copies frozen rows to the pool's own buffers, which then have all slots.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); the pool is unchanged.
    fn own(&mut self) -> Result<()>;

    /// Returns the buffers, for evaluation. They do not contain frozen rows.
    fn buffers(&self) -> Vec<&Array>;

    /// Rolls back the writes since the buffers were last evaluated. Evaluated writes stay.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn roll_back(&mut self) -> Result<()>;

    /// Frees the buffers.
    fn release(&mut self);

    /// Copies the rows of a plane to `bytes`: slot by slot, with the heads of a slot next to each other.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn copy_out(&self, plane: usize, slots: &Slots, bytes: &mut [u8]) -> Result<()>;

    /// Writes bytes that [`copy_out`](Self::copy_out) copied.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn copy_in(&mut self, plane: usize, slots: &Slots, bytes: &[u8]) -> Result<()>;
}

/// Returns a pool without slots, for rows of `head_dim` elements in `n_kv_heads` heads.
///
/// # Errors
/// [`InvalidArgument`](crate::Status::InvalidArgument) if rows of `head_dim` elements do not fit
/// the format.
pub fn pool_for(format: KvFormat, n_kv_heads: i32, head_dim: i32) -> Result<Box<dyn Pool>> {
    let codec = codec_for(format, head_dim)?;
    let planes = Planes::new(n_kv_heads, codec.layout());
    Ok(Box::new(CodecPool { codec, planes }))
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
pub fn convert(pool: &mut Box<dyn Pool>, format: KvFormat, used: i32) -> Result<()> {
    if pool.format() == format {
        return Ok(());
    }
    let mut converted = pool_for(format, pool.n_kv_heads(), pool.head_dim())?;
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

/// The pool of any format.
struct CodecPool {
    codec: Arc<dyn Codec>,
    planes: Planes,
}

impl Pool for CodecPool {
    fn format(&self) -> KvFormat {
        self.codec.format()
    }

    fn n_kv_heads(&self) -> i32 {
        self.planes.n_kv_heads()
    }

    fn head_dim(&self) -> i32 {
        self.codec.head_dim()
    }

    fn slots(&self) -> i32 {
        self.planes.slots()
    }

    fn grow(&mut self, slots: i32) -> Result<()> {
        self.planes.grow(slots)
    }

    fn write(&mut self, slots: &Slots, rows: &Array) -> Result<()> {
        let expected = [1, self.n_kv_heads(), slots.len() as i32, self.head_dim()];
        if rows.shape() != expected {
            fail!(Shape, "expected rows of shape {expected:?}, got {:?}", rows.shape());
        }
        if slots.is_empty() {
            return Ok(());
        }
        self.planes.write(slots, &self.codec.encode(rows)?)
    }

    fn read(&self, start: i32, stop: i32) -> Result<KvView> {
        let parts = self.planes.slice(start, stop)?;
        Ok(KvView { codec: Arc::clone(&self.codec), parts, in_keys: false })
    }

    fn copy(&self, slots: &Slots) -> Result<StoredRows> {
        Ok(StoredRows { format: self.format(), parts: self.planes.copy(slots)? })
    }

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
        self.planes.write(slots, &rows.parts)
    }

    fn restore(&mut self, slots: &Slots, rows: &StoredRows) -> Result<()> {
        if rows.format != self.format() {
            fail!(Internal, "cannot write rows of {} to slots of {}", rows.format, self.format());
        }
        self.planes.write_unfrozen(slots, &rows.parts)
    }

    fn blank(&mut self, slots: &Slots) -> Result<()> {
        let shape = [1, self.n_kv_heads(), slots.len() as i32, self.head_dim()];
        let zeros = self.codec.encode(&zeros_dtype(&shape, Dtype::Float32)?)?;
        self.planes.write_unfrozen(slots, &zeros)
    }

    fn base(&self) -> i32 {
        self.planes.base()
    }

    fn shared(&self) -> i32 {
        self.planes.shared()
    }

    fn freeze(&mut self, end: i32, anew: bool) -> Result<()> {
        self.planes.freeze(end, anew)
    }

    fn share(&mut self, end: i32) -> Vec<Piece> {
        self.planes.share(end)
    }

    fn attach(&mut self, pieces: &[Piece]) -> Result<()> {
        self.planes.attach(pieces)
    }

    fn own(&mut self) -> Result<()> {
        self.planes.own_from(0)
    }

    fn buffers(&self) -> Vec<&Array> {
        self.planes.buffers().iter().collect()
    }

    fn roll_back(&mut self) -> Result<()> {
        self.planes.roll_back()
    }

    fn release(&mut self) {
        self.planes.release();
    }

    fn copy_out(&self, plane: usize, slots: &Slots, bytes: &mut [u8]) -> Result<()> {
        self.planes.copy_out(plane, slots, bytes)
    }

    fn copy_in(&mut self, plane: usize, slots: &Slots, bytes: &[u8]) -> Result<()> {
        self.planes.copy_in(plane, slots, bytes)
    }
}

#[cfg(test)]
mod tests;
