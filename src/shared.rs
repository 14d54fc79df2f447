//! A cache that several owners share.

use std::sync::{Arc, Mutex, MutexGuard};

use crate::cache::AttendCache;
use crate::error::{fail, Result};

/// A cache that sessions, programs and handles share. It lives until the last of
/// them is gone.
///
/// A panic of whoever has the cache breaks it: what it holds is unknown then, so
/// everybody after is refused.
#[derive(Clone)]
pub struct SharedCache(Arc<Mutex<dyn AttendCache>>);

impl SharedCache {
    /// A cache to share.
    pub fn new(cache: impl AttendCache + 'static) -> Self {
        Self(Arc::new(Mutex::new(cache)))
    }

    /// Waits for others to be done with the cache, and takes it: for a look, a
    /// change, or the whole of a step. A change and a step are made inside
    /// [`mlx::run`](crate::mlx::run), which is entered before: MLX first, the cache
    /// second, everywhere.
    ///
    /// # Errors
    /// [`Internal`](crate::Status::Internal) where the cache is broken.
    pub fn lock(&self) -> Result<MutexGuard<'_, dyn AttendCache + 'static>> {
        match self.0.lock() {
            Ok(cache) => Ok(cache),
            Err(_) => fail!(
                Internal,
                "the cache broke when a call on it failed by a defect; it can only be freed"
            ),
        }
    }

    /// Whether both are the same cache.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
