//! An allocator that counts allocations, for test programs with one test.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator with a counter.
struct CountingAllocator;

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Returns the number of allocations of the process during `work`. Takes the minimum of several runs, because
/// the test harness sometimes allocates on another thread.
pub fn allocations(mut work: impl FnMut()) -> usize {
    let count = |()| {
        let before = COUNT.load(Ordering::SeqCst);
        work();
        COUNT.load(Ordering::SeqCst) - before
    };
    [(); 5].map(count).into_iter().min().unwrap_or_default()
}

// SAFETY: all calls are forwarded to the system's allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller upholds the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
