//! Limits on memory and time for one damaged file. If a file exceeds one of them, its seed is printed.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The maximum number of bytes by which a file may increase the memory of the process.
const MAX_BYTES: usize = 64 << 20;

const MAX_TIME: Duration = Duration::from_secs(60);

static LIVE: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
static SEED: AtomicU64 = AtomicU64::new(0);
/// The number of the current file, counted over all seeds.
static FILE: AtomicU64 = AtomicU64::new(0);

/// The system's allocator, which counts the bytes in use and ends the process if they exceed the limit. It ends the
/// process because the library would turn a lack of memory into an error, and the test would not notice.
struct LimitedAllocator;

fn taken(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
    if live > LIMIT.load(Ordering::Relaxed) {
        LIMIT.store(usize::MAX, Ordering::Relaxed);
        let seed = SEED.load(Ordering::Relaxed);
        eprintln!("failed with ETKV_SEED={seed}: a file needs {bytes} bytes more, {live} in all");
        std::process::abort();
    }
}

// SAFETY: all calls are forwarded to the system's allocator.
unsafe impl GlobalAlloc for LimitedAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: as required of the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: as required of the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as required of the caller.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: LimitedAllocator = LimitedAllocator;

/// Ends the process if one file takes too long.
pub fn watch() {
    std::thread::spawn(|| {
        let (mut file, mut since) = (0, Instant::now());
        loop {
            std::thread::sleep(Duration::from_millis(200));
            let now = FILE.load(Ordering::Relaxed);
            if now != file {
                (file, since) = (now, Instant::now());
            } else if since.elapsed() > MAX_TIME && LIMIT.load(Ordering::Relaxed) != usize::MAX {
                eprintln!("failed with ETKV_SEED={}: a file hangs", SEED.load(Ordering::Relaxed));
                std::process::abort();
            }
        }
    });
}

/// Runs `work` for one file of a seed, within the limits.
pub fn limited<T>(seed: u64, work: impl FnOnce() -> T) -> T {
    SEED.store(seed, Ordering::Relaxed);
    FILE.fetch_add(1, Ordering::Relaxed);
    LIMIT.store(LIVE.load(Ordering::Relaxed) + MAX_BYTES, Ordering::Relaxed);
    let result = work();
    LIMIT.store(usize::MAX, Ordering::Relaxed);
    result
}
