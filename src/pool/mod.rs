//! How the rows of one layer's keys or values are kept: the bytes.
//!
//! A pool knows slots and formats. It does not know positions, sequences or
//! steps; a cache drives one pool for keys and one for values of each layer.

mod float;

pub use float::FloatPool;

use mlx_rs::Array;

use crate::bookkeeping::Slots;
use crate::config::KvFormat;
use crate::error::Result;

/// Rows of one layer's keys, or of its values, in slots.
///
/// Rows are shaped `[1, n_kv_heads, n, head_dim]`. Slots that were never written
/// are zero.
pub trait Pool: Send {
    /// How the rows are stored.
    fn format(&self) -> KvFormat;

    /// Slots allocated.
    fn slots(&self) -> i32;

    /// Bytes of one slot.
    fn slot_bytes(&self) -> u64;

    /// Grows to `slots` slots, keeping what is there; never shrinks.
    ///
    /// # Errors
    /// [`Mlx`](crate::Status::Mlx).
    fn grow(&mut self, slots: i32) -> Result<()>;

    /// Writes rows to these slots, in place. They are allocated.
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
    fn read(&self, start: i32, stop: i32) -> Result<Rows>;

    /// Copies of what is stored in these slots, bit for bit, to be evaluated
    /// before the next write.
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

    /// Gives the buffers back.
    fn release(&mut self);
}
