//! How rows are kept on MLX arrays: the bytes.
//!
//! [`MlxStore`] is the storage of a cache: a pool for the keys and one for the values of
//! each layer. A pool knows slots and formats; it does not know positions, sequences or
//! steps.
//!
//! A format is a [`Codec`]: planes of a row, and how to compute with them. The
//! buffers of all formats are the same planes.

mod affine;
mod bits;
mod block_float;
mod codec;
mod float;
mod kv_view;
mod mlx_store;
mod packed;
mod planes;
mod row;

pub use codec::Codec;
pub(crate) use float::float_dtype;
pub use kv_view::{KvView, StoredRows};
pub use mlx_store::{MlxStore, SavedRows};
pub use planes::{Layout, Parts, Plane};

use std::sync::Arc;

use mlx_rs::{Array, Dtype};

use crate::error::{fail, Result};
use crate::format::KvFormat;
use block_float::BlockFloat;
use etkv_core::bookkeeping::Slots;
use planes::Planes;
use row::{Element, Row};

/// Rows of one layer's keys, or of its values, in slots.
///
/// Rows are shaped `[1, n_kv_heads, n, head_dim]`. Slots that were never written
/// are zero.
pub trait Pool: Send {
    /// How the rows are stored.
    fn format(&self) -> KvFormat;

    /// KV heads.
    fn n_kv_heads(&self) -> i32;

    /// Elements of one row.
    fn head_dim(&self) -> i32;

    /// Slots allocated.
    fn slots(&self) -> i32;

    /// Bytes of one slot.
    fn slot_bytes(&self) -> u64;

    /// Grows to `slots` slots, keeping what is there; never shrinks. Both sizes
    /// are held for a moment.
    ///
    /// # Errors
    /// [`Mlx`](crate::Status::Mlx); the pool stays as it is.
    fn grow(&mut self, slots: i32) -> Result<()>;

    /// Writes rows to these slots, in place. They are allocated, and none is named
    /// twice.
    ///
    /// # Errors
    /// [`Mlx`](crate::Status::Mlx).
    fn write(&mut self, slots: &Slots, rows: &Array) -> Result<()>;

    /// The slots from `start` to `stop` as attention reads them: a view.
    ///
    /// The view keeps the buffers: writes copy all of them until it is gone.
    ///
    /// # Errors
    /// [`Mlx`](crate::Status::Mlx).
    fn read(&self, start: i32, stop: i32) -> Result<KvView>;

    /// Copies of what is stored in these slots, bit for bit, to be evaluated
    /// before the next write. There is at least one slot.
    ///
    /// # Errors
    /// [`Mlx`](crate::Status::Mlx).
    fn copy(&self, slots: &Slots) -> Result<StoredRows>;

    /// Puts copies into as many other slots, or back into the same.
    ///
    /// # Errors
    /// [`Mlx`](crate::Status::Mlx).
    fn put(&mut self, slots: &Slots, rows: &StoredRows) -> Result<()>;

    /// The buffers, for evaluation.
    fn buffers(&self) -> Vec<&Array>;

    /// Rolls back what was written since the buffers were evaluated. What of it
    /// was evaluated stays in its slots.
    ///
    /// # Errors
    /// [`Mlx`](crate::Status::Mlx).
    fn roll_back(&mut self) -> Result<()>;

    /// Gives the buffers back.
    fn release(&mut self);
}

/// A pool without slots, for rows of `head_dim` elements in `n_kv_heads` heads.
///
/// # Errors
/// [`InvalidArgument`](crate::Status::InvalidArgument) where rows of `head_dim`
/// do not fit the format.
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
        other => fail!(Unsupported, "MLX storage has no format {other}; choose another"),
    })
}

/// Slots that are converted at a time.
const CONVERTED_SLOTS: i32 = 1024;

/// Stores a pool's rows in another format. Slots from `used` on become zero.
///
/// The rows of 1024 slots are unpacked at a time; both pools are held until the
/// last of them is evaluated.
///
/// # Errors
/// - [`InvalidArgument`](crate::Status::InvalidArgument) where the rows do not fit
///   the format.
/// - [`Mlx`](crate::Status::Mlx). The pool stays as it is.
pub fn convert(pool: &mut Box<dyn Pool>, format: KvFormat, used: i32) -> Result<()> {
    if pool.format() == format {
        return Ok(());
    }
    let mut converted = pool_for(format, pool.n_kv_heads(), pool.head_dim())?;
    converted.grow(pool.slots())?;
    let used = used.min(pool.slots());
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

    fn slot_bytes(&self) -> u64 {
        let row = self.format().row_bytes(self.head_dim() as usize);
        self.n_kv_heads() as u64 * row as u64
    }

    fn grow(&mut self, slots: i32) -> Result<()> {
        self.planes.grow(slots)
    }

    fn write(&mut self, slots: &Slots, rows: &Array) -> Result<()> {
        let expected = [1, self.n_kv_heads(), slots.len() as i32, self.head_dim()];
        if rows.shape() != expected {
            fail!(Shape, "rows of shape {:?} are written where {expected:?} fit", rows.shape());
        }
        if slots.is_empty() {
            return Ok(());
        }
        self.planes.write(slots, &self.codec.encode(rows)?)
    }

    fn read(&self, start: i32, stop: i32) -> Result<KvView> {
        Ok(KvView { codec: Arc::clone(&self.codec), parts: self.planes.slice(start, stop)? })
    }

    fn copy(&self, slots: &Slots) -> Result<StoredRows> {
        Ok(StoredRows { format: self.format(), parts: self.planes.copy(slots)? })
    }

    fn put(&mut self, slots: &Slots, rows: &StoredRows) -> Result<()> {
        if rows.format != self.format() || rows.len() != slots.len() {
            fail!(
                Internal,
                "{} rows of {} are put into {} slots of {}",
                rows.len(),
                rows.format,
                slots.len(),
                self.format()
            );
        }
        self.planes.write(slots, &rows.parts)
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
}

#[cfg(test)]
mod tests;
