//! An allocator that counts, for test programs with one test.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, which counts.
struct CountingAllocator;

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Returns the allocations of the process during `work`, in the call with the fewest of several: the test
/// harness sometimes allocates on its own thread.
pub fn allocations(mut work: impl FnMut()) -> usize {
    let count = |()| {
        let before = COUNT.load(Ordering::SeqCst);
        work();
        COUNT.load(Ordering::SeqCst) - before
    };
    [(); 5].map(count).into_iter().min().unwrap_or_default()
}

// SAFETY: it forwards all calls.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::SeqCst);
        // SAFETY: as for this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: as for this function.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
