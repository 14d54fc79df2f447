//! A cache that several owners share.

use std::any::Any;
use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

use crate::cache::{AttendCache, Cache};
use crate::error::{fail, Result};
use crate::reclaim::inside;
use crate::store::Store;

/// A cache that sessions, programs and other owners share, with its runner's face. It lives until its last owner is
/// dropped.
///
/// A panic during a call poisons the cache: its contents are unknown, and every later call is refused.
#[derive(Clone)]
pub struct SharedCache {
    cache: Shared<dyn Cache>,
    /// The same cache as a [`ProgramCache`], whose store type is erased here.
    program: Arc<dyn Any + Send + Sync>,
    /// The name of the store.
    store: &'static str,
    facts: Arc<Facts>,
    /// The programs that were loaded with the cache, the newest last.
    bound: Arc<Mutex<Vec<Weak<dyn Any + Send + Sync>>>>,
}

/// The facts of a cache, which are read without its lock.
struct Facts {
    kind: String,
    capacity: i32,
    n_layers: usize,
    n_recurrent_layers: usize,
    max_step_tokens: i32,
    holder: Option<u64>,
}

/// A shared cache, with the face for programs of one backend.
pub type ProgramCache<S> = Shared<dyn AttendCache<Store = S>>;

/// A locked [`SharedCache`]; other threads wait until this is dropped.
pub type CacheGuard<'a> = SharedGuard<'a, dyn Cache>;

/// A locked [`ProgramCache`]; other threads wait until this is dropped.
pub type ProgramGuard<'a, S> = SharedGuard<'a, dyn AttendCache<Store = S>>;

impl SharedCache {
    /// Returns a shared cache.
    pub fn new<C: AttendCache + 'static>(cache: C) -> Self {
        let facts = Arc::new(Facts {
            kind: cache.kind().to_owned(),
            capacity: cache.capacity(),
            n_layers: cache.config().layers.len(),
            n_recurrent_layers: cache.config().recurrent_layers.len(),
            max_step_tokens: cache.config().step_limit(),
            holder: cache.holder(),
        });
        let place = Arc::new(LockedCache {
            holder: AtomicU64::new(0),
            give_way: C::Store::give_way,
            cache: Mutex::new(cache),
        });
        let program: ProgramCache<C::Store> = Shared(place.clone());
        Self {
            cache: Shared(place),
            program: Arc::new(program),
            store: C::Store::NAME,
            facts,
            bound: Arc::default(),
        }
    }

    /// Returns the name of the kind. This and the next five functions do not wait for the lock, and also work for a
    /// poisoned cache.
    pub fn kind(&self) -> &str {
        &self.facts.kind
    }

    /// Returns the maximum number of positions of the cache.
    pub fn capacity(&self) -> i32 {
        self.facts.capacity
    }

    /// Returns the number of attention layers.
    pub fn n_layers(&self) -> usize {
        self.facts.n_layers
    }

    /// Returns the number of recurrent layers.
    pub fn n_recurrent_layers(&self) -> usize {
        self.facts.n_recurrent_layers
    }

    /// Returns the maximum number of tokens of one step; see
    /// [`CacheConfig::step_limit`](crate::CacheConfig::step_limit).
    pub fn max_step_tokens(&self) -> i32 {
        self.facts.max_step_tokens
    }

    /// Returns the cache's number in [`MemoryBudget::holders`](crate::MemoryBudget::holders), if it has one.
    pub fn holder(&self) -> Option<u64> {
        self.facts.holder
    }

    /// Locks the cache for a query or a change. Waits for other threads. If this thread holds the lock of the cache's
    /// backend, it releases that lock while it waits, so the order of the two locks does not matter.
    ///
    /// # Errors
    /// [`Internal`](crate::Status::Internal) if the cache is poisoned. [`Step`](crate::Status::Step) if this thread
    /// already holds the lock and would wait forever, or if it runs a [`Reclaim`](crate::Reclaim) while another
    /// thread uses the cache.
    pub fn lock(&self) -> Result<CacheGuard<'_>> {
        self.cache.lock()
    }

    /// Returns the cache with its face for programs of the backend with store `S`. Call it for a program that begins to
    /// use the cache: in layers with values in keys, the next step [compares](AttendCache::expect_program) the values
    /// with the keys.
    ///
    /// # Errors
    /// [`Kind`](crate::Status::Kind) if the cache has another backend's store.
    pub fn program<S: Store>(&self) -> Result<ProgramCache<S>> {
        let program = self.face::<S>()?;
        // A poisoned cache refuses the step itself.
        if let Ok(mut cache) = program.lock() {
            cache.expect_program();
        }
        Ok(program.clone())
    }

    /// Checks that programs of the backend with store `S` can use the cache.
    ///
    /// # Errors
    /// As [`program`](Self::program).
    pub fn check_store<S: Store>(&self) -> Result<()> {
        self.face::<S>().map(|_| ())
    }

    fn face<S: Store>(&self) -> Result<&ProgramCache<S>> {
        match self.program.downcast_ref::<ProgramCache<S>>() {
            Some(program) => Ok(program),
            None => fail!(
                Kind,
                "expected a cache in {} storage, got one in {} storage; make it for this backend",
                S::NAME,
                self.store
            ),
        }
    }

    /// Registers a program that was loaded with this cache, or data that a backend keeps for it. The cache does not
    /// keep the object alive.
    pub fn bind<T: Any + Send + Sync>(&self, program: &Arc<T>) {
        let program: Weak<T> = Arc::downgrade(program);
        let mut bound = self.bound();
        bound.retain(|other| other.strong_count() > 0);
        bound.push(program);
    }

    /// Returns the [bound](Self::bind) objects of this type that are alive, the newest first.
    pub fn bound_programs<T: Any + Send + Sync>(&self) -> Vec<Arc<T>> {
        let alive = self.bound().iter().rev().filter_map(Weak::upgrade).collect::<Vec<_>>();
        alive.into_iter().filter_map(|program| program.downcast().ok()).collect()
    }

    fn bound(&self) -> MutexGuard<'_, Vec<Weak<dyn Any + Send + Sync>>> {
        self.bound.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether both are the same cache.
    pub fn is(&self, other: &Self) -> bool {
        self.cache.is(&other.cache)
    }
}

/// One face of a shared cache.
pub struct Shared<C: ?Sized>(Arc<LockedCache<C>>);

struct LockedCache<C: ?Sized> {
    /// The number of the thread that holds the lock, or 0.
    holder: AtomicU64,
    /// [`Store::give_way`] of the cache's store.
    give_way: fn(&mut dyn FnMut()),
    cache: Mutex<C>,
}

impl<C: ?Sized> Clone for Shared<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<C: ?Sized> Shared<C> {
    /// Returns whether both are the same cache.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Locks the cache for a call or a whole step; see [`SharedCache::lock`].
    ///
    /// # Errors
    /// Errors of [`SharedCache::lock`].
    pub fn lock(&self) -> Result<SharedGuard<'_, C>> {
        let thread = this_thread();
        // Only this thread stores its number, so any other value means another thread.
        if self.0.holder.load(Ordering::Relaxed) == thread {
            fail!(
                Step,
                "the cache is called from inside a call on it; wait until that call returns"
            );
        }
        let Some(cache) = self.wait()? else {
            fail!(
                Internal,
                "the cache is poisoned: a call on it failed because of a defect; it can only be freed"
            )
        };
        self.0.holder.store(thread, Ordering::Relaxed);
        let unwinding = std::thread::panicking();
        Ok(SharedGuard { holder: &self.0.holder, unwinding, cache })
    }

    /// Waits until no other thread uses the cache, and returns it, or `None` if it is poisoned.
    fn wait(&self) -> Result<Option<MutexGuard<'_, C>>> {
        Ok(match self.0.cache.try_lock() {
            Ok(cache) => Some(cache),
            Err(TryLockError::Poisoned(_)) => None,
            // This thread holds the cache that requests memory, and the other thread may be waiting for that cache.
            Err(TryLockError::WouldBlock) if inside() => fail!(
                Step,
                "the cache is in use, and a reclaimer of the memory budget must not wait for it; free \
                 another one"
            ),
            Err(TryLockError::WouldBlock) => {
                let mut cache = None;
                (self.0.give_way)(&mut || cache = self.0.cache.lock().ok());
                cache
            }
        })
    }
}

/// A locked shared cache; other threads wait until this is dropped.
pub struct SharedGuard<'a, C: ?Sized> {
    holder: &'a AtomicU64,
    /// Whether the thread was already panicking when it locked the cache. That panic is not a defect of this call.
    unwinding: bool,
    cache: MutexGuard<'a, C>,
}

impl<C: ?Sized> Deref for SharedGuard<'_, C> {
    type Target = C;

    fn deref(&self) -> &C {
        &self.cache
    }
}

impl<C: ?Sized> DerefMut for SharedGuard<'_, C> {
    fn deref_mut(&mut self) -> &mut C {
        &mut self.cache
    }
}

impl<C: ?Sized> Drop for SharedGuard<'_, C> {
    fn drop(&mut self) {
        if !self.unwinding && std::thread::panicking() {
            tracing::error!(
                target: crate::watch::TARGET,
                "the cache is poisoned: a call on it failed because of a defect"
            );
        }
        // The lock is released after this store.
        self.holder.store(0, Ordering::Relaxed);
    }
}

/// Returns this thread's number, which is unique and not 0.
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
