//! The interface to threads that share the work of a call.

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
