//! How the rows of one layer's keys or values are kept: the bytes.
//!
//! A pool knows slots and formats. It does not know positions, sequences or
//! steps; a cache drives one pool for keys and one for values of each layer.

mod float;

pub use float::FloatPool;

use mlx_rs::Array;

use crate::config::KvFormat;
use crate::error::Result;

/// Rows of one layer's keys, or of its values, in slots.
///
/// Rows are shaped `[1, n_kv_heads, n, head_dim]`. Slots that were never written
/// are zero.
pub trait Pool: Send {
    /// Slots allocated.
    fn slots(&self) -> i32;

    /// Bytes of one slot.
    fn slot_bytes(&self) -> u64;

    /// Grows to `slots` slots, keeping what is there; never shrinks.
    ///
    /// # Errors
    /// [`Mlx`](crate::Status::Mlx).
    fn grow(&mut self, slots: i32) -> Result<()>;

    /// Writes rows to the slots from `start` on, in place. They are allocated.
    ///
    /// # Errors
    /// [`Mlx`](crate::Status::Mlx).
    fn write(&mut self, start: i32, rows: &Array) -> Result<()>;

    /// The rows of the slots from `start` to `stop`, as a view.
    ///
    /// The view keeps the buffer: writes copy all of it until the view is gone.
    ///
    /// # Errors
    /// [`Mlx`](crate::Status::Mlx).
    fn read(&self, start: i32, stop: i32) -> Result<Array>;

    /// The buffers, for evaluation.
    fn buffers(&self) -> Vec<&Array>;

    /// Gives the buffers back.
    fn release(&mut self);
}

/// An empty pool of this format.
pub fn pool_for(format: KvFormat, n_kv_heads: i32, head_dim: i32) -> Box<dyn Pool> {
    match format {
        KvFormat::F32 | KvFormat::F16 | KvFormat::Bf16 => {
            Box::new(FloatPool::new(format, n_kv_heads, head_dim))
        }
    }
}
