//! Reclaimers: objects that free memory when the memory budget is full.

use std::cell::Cell;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tracing::{debug, error};

use crate::watch::TARGET;

/// An object that can free memory that the [`MemoryBudget`](crate::MemoryBudget) counts.
///
/// # Threads and locks
///
/// The budget calls a reclaimer during the call that needs memory, such as the beginning of a step. This call may
/// come from any thread, from several threads at once, and while a thread holds the lock of the cache that requests
/// memory. So a reclaimer must not wait for a lock that a thread may hold while it requests memory: it tries to lock,
/// and frees nothing if it does not get the lock. It also must not wait for work on another thread.
///
/// The budget enforces this for caches: inside a reclaimer, [`SharedCache::lock`](crate::SharedCache::lock) refuses a
/// cache that is in use, such as the one that requests memory, with [`Step`](crate::Status::Step). A reservation by a
/// reclaimer is refused if it does not fit; no reclaimer is called for it.
///
/// A panic is logged, and counts as 0 freed bytes.
pub trait Reclaim: Send + Sync {
    /// Tries to free at least `bytes` of the budget. It may free less, or nothing. Returns the number of freed bytes
    /// for the log; the budget does not rely on it.
    fn reclaim(&self, bytes: u64) -> u64;
}

/// The kind of memory that a reclaimer frees. Earlier classes are called first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ReclaimClass {
    /// Idle prefixes that can be read again.
    IdlePrefixes,
    /// Memory that the application chooses in its callback.
    Host,
}

/// The reclaimers of a budget.
#[derive(Debug)]
pub(crate) struct Reclaimers(Mutex<Vec<(ReclaimClass, Weak<dyn Reclaim>)>>);

impl std::fmt::Debug for dyn Reclaim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a reclaimer")
    }
}

impl Reclaimers {
    pub const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Adds a reclaimer after the others of its class. Removes reclaimers that have been dropped.
    pub fn add(&self, class: ReclaimClass, reclaimer: Weak<dyn Reclaim>) {
        let mut all = self.0.lock();
        all.retain(|(_, reclaimer)| reclaimer.strong_count() > 0);
        let at = all.partition_point(|&(other, _)| other <= class);
        all.insert(at, (class, reclaimer));
    }

    /// Calls the reclaimers in order, without holding a lock, as long as `fits` returns a number of lacking bytes.
    /// Stops when `fits` returns `None`.
    pub fn ask(&self, fits: &mut dyn FnMut() -> Option<u64>) {
        let all: Vec<_> = {
            let all = self.0.lock();
            all.iter().filter_map(|(class, weak)| Some((*class, weak.upgrade()?))).collect()
        };
        for (class, reclaimer) in all {
            let Some(lacking) = fits() else { return };
            let freed = run(reclaimer, lacking);
            debug!(target: TARGET, ?class, lacking, freed, "the memory budget is full");
        }
        fits();
    }
}

fn run(reclaimer: Arc<dyn Reclaim>, lacking: u64) -> u64 {
    let _inside = ReclaimScope::enter();
    // `reclaimer` may be the last handle of its object. The closure owns it, so that the object is dropped inside the
    // scope too.
    let call = AssertUnwindSafe(move || reclaimer.reclaim(lacking));
    catch_unwind(call).unwrap_or_else(|_| {
        error!(target: TARGET, "a reclaimer of the memory budget failed because of a defect");
        0
    })
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this thread runs a reclaimer.
pub(crate) fn inside() -> bool {
    INSIDE.try_with(Cell::get).unwrap_or(false)
}

/// Marks this thread as running a reclaimer, until dropped.
struct ReclaimScope;

impl ReclaimScope {
    fn enter() -> Self {
        let _ = INSIDE.try_with(|inside| inside.set(true));
        Self
    }
}

impl Drop for ReclaimScope {
    fn drop(&mut self) {
        let _ = INSIDE.try_with(|inside| inside.set(false));
    }
}
