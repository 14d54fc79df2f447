//! Threads that share the work of one call.

/// Threads that can make calls at the same time: the host's.
pub trait Parallel: Send + Sync {
    /// Returns how many calls can run at the same time.
    fn threads(&self) -> usize;

    /// Calls `call` with each of `0..count` once, and returns after the last. Calls may run at the same time
    /// and in any order.
    fn run(&self, count: usize, call: &(dyn Fn(usize) + Sync));
}

/// Makes calls one after another.
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
