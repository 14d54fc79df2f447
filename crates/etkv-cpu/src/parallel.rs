//! The interface to threads that share the work of a call.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The host's threads.
pub trait Parallel: Send + Sync {
    /// Returns how many calls can run at the same time.
    fn threads(&self) -> usize;

    /// Calls `call` with each of `0..count` once, and returns after the last. Calls may run at the same time
    /// and in any order.
    fn run(&self, count: usize, call: &(dyn Fn(usize) + Sync));
}

/// Runs calls one after another on the current thread.
#[derive(Debug, Clone, Copy, Default)]
pub struct Serial;

impl Parallel for Serial {
    fn threads(&self) -> usize {
        1
    }

    fn run(&self, count: usize, call: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(call);
    }
}

/// Calls `work` with each of `0..count` once, on `threads` threads. A thread gets the next number when it has
/// finished its previous one. `begin` returns what a thread uses for all its numbers.
pub(crate) fn share<T>(
    parallel: &dyn Parallel,
    threads: usize,
    count: usize,
    begin: impl Fn(usize) -> T + Sync,
    work: impl Fn(&mut T, usize) + Sync,
) {
    let begun = AtomicUsize::new(0);
    parallel.run(threads, &|thread| {
        let mut own = None;
        loop {
            let i = begun.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                break;
            }
            work(own.get_or_insert_with(|| begin(thread)), i);
        }
    });
}
