//! Caches: a bookkeeping and its pools, behind two faces.
//!
//! [`Cache`] is what a runner controls, in integers. [`AttendCache`] is what a
//! program's `update_and_attend` drives, in arrays. One object has both.

mod contiguous;

pub use contiguous::ContiguousCache;

use mlx_rs::Array;

use crate::attend::AttendSpec;
use crate::config::CacheConfig;
use crate::error::Result;

/// Bytes of a cache's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Memory {
    /// Held now.
    pub allocated: u64,
    /// Of these, in use by positions.
    pub used: u64,
    /// What it would hold at capacity.
    pub at_capacity: u64,
}

/// The runner's face of a cache.
pub trait Cache: Send {
    /// The kind's name, as sessions ask for it.
    fn kind(&self) -> &'static str;

    /// What the cache was made from.
    fn config(&self) -> &CacheConfig;

    /// The most positions that it holds.
    fn capacity(&self) -> i32;

    /// The positions that it holds.
    fn length(&self) -> i32;

    /// Whether `n` more positions fit; negative `n` never do.
    fn can_extend(&self, n: i32) -> bool;

    /// Forgets every position, and gives the buffers back if `release`.
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) while a step is open.
    fn clear(&mut self, release: bool) -> Result<()>;

    /// Forgets the positions from `length` on.
    ///
    /// # Errors
    /// - [`Position`](crate::Status::Position) if `length` is negative or more
    ///   than the present length.
    /// - [`Step`](crate::Status::Step) while a step is open.
    fn rewind(&mut self, length: i32) -> Result<()>;

    /// Bytes of the buffers.
    fn memory(&self) -> Memory;
}

/// The program's face of a cache. Drive it through a [`Step`](crate::Step),
/// which cannot forget to end.
pub trait AttendCache: Cache {
    /// Opens a step of these positions, one a query token.
    ///
    /// # Errors
    /// The cache's own for positions that it cannot take, and
    /// [`Step`](crate::Status::Step) while another step is open.
    fn begin(&mut self, positions: &[i32]) -> Result<()>;

    /// Writes a layer's new rows and tells what its queries attend to.
    ///
    /// `k` is `[1, n_kv_heads, T, k_head_dim]`, `v` is
    /// `[1, n_kv_heads, T, v_head_dim]`.
    ///
    /// # Errors
    /// - [`Step`](crate::Status::Step) outside a step, or for a layer that this
    ///   step has had.
    /// - [`Shape`](crate::Status::Shape) for rows or layers that do not fit.
    /// - [`Mlx`](crate::Status::Mlx).
    fn update_and_fetch(&mut self, layer: usize, k: &Array, v: &Array) -> Result<AttendSpec>;

    /// The buffers that the open step writes to: evaluate them with the step's
    /// outputs.
    fn buffers(&self) -> Vec<&Array>;

    /// Makes the step's positions visible.
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) if no step is open or a layer is missing;
    /// the step stays open.
    fn commit(&mut self) -> Result<()>;

    /// Ends the step as if it had not been. Does nothing outside one.
    fn abort(&mut self);
}
