//! A cache that several owners share.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::cache::AttendCache;
use crate::error::{fail, Result};

/// A cache that sessions, programs and handles share. It lives until the last of
/// them is gone.
///
/// A panic of whoever has the cache breaks it: what it holds is unknown then, so
/// everybody after is refused.
#[derive(Clone)]
pub struct SharedCache(Arc<Shared<dyn AttendCache>>);

struct Shared<C: ?Sized> {
    /// The number of the thread that has the cache; 0 for none.
    holder: AtomicU64,
    cache: Mutex<C>,
}

impl SharedCache {
    /// A cache to share.
    pub fn new(cache: impl AttendCache + 'static) -> Self {
        Self(Arc::new(Shared { holder: AtomicU64::new(0), cache: Mutex::new(cache) }))
    }

    /// Waits for others to be done with the cache, and takes it: for a look, a
    /// change, or the whole of a step. A change and a step are made inside
    /// [`mlx::run`](crate::mlx::run), which is entered before: MLX first, the cache
    /// second, everywhere.
    ///
    /// # Errors
    /// [`Internal`](crate::Status::Internal) where the cache is broken, and
    /// [`Step`](crate::Status::Step) where this thread has it already: the wait
    /// would have no end.
    pub fn lock(&self) -> Result<CacheGuard<'_>> {
        let thread = this_thread();
        // Only this thread stores its own number, so others' are just not it.
        if self.0.holder.load(Ordering::Relaxed) == thread {
            fail!(Step, "the cache is asked from inside a call on it");
        }
        match self.0.cache.lock() {
            Ok(cache) => {
                self.0.holder.store(thread, Ordering::Relaxed);
                Ok(CacheGuard { holder: &self.0.holder, cache })
            }
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

/// A shared cache that is taken; others wait until this is dropped.
pub struct CacheGuard<'a> {
    holder: &'a AtomicU64,
    cache: MutexGuard<'a, dyn AttendCache + 'static>,
}

impl Deref for CacheGuard<'_> {
    type Target = dyn AttendCache;

    fn deref(&self) -> &Self::Target {
        &*self.cache
    }
}

impl DerefMut for CacheGuard<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut *self.cache
    }
}

impl Drop for CacheGuard<'_> {
    fn drop(&mut self) {
        // Before the lock goes, which is what is dropped next.
        self.holder.store(0, Ordering::Relaxed);
    }
}

/// A number that no other thread has, and that is not 0.
fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: Cell<u64> = const { Cell::new(0) };
    }
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}
