//! Forwards during which the process runs out of memory. Each is refused and changes nothing.

#![allow(clippy::panic, clippy::unwrap_used)]

mod calls;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use calls::Method;
use etkv_core::{CacheConfig, Growth, KvFormat, LayerPolicy, Session, Status};
use etkv_cpu::{builders, CellsCache, ContiguousCache, CPU_BACKEND};

/// Allocations of at least this many bytes can fail. Those of the test itself are smaller.
const LARGE: usize = 1024;

/// The system's allocator, with a limit on the number of large blocks that a thread can allocate.
struct FailingAllocator;

thread_local! {
    static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
}

// SAFETY: calls are forwarded to the system's allocator, or return no memory.
unsafe impl GlobalAlloc for FailingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= LARGE {
            let left = LEFT.get();
            LEFT.set(left.map(|n| n.saturating_sub(1)));
            if left == Some(0) {
                return std::ptr::null_mut();
            }
        }
        // SAFETY: the caller upholds the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: FailingAllocator = FailingAllocator;

/// The number of tokens of each forward. The forwards include growth and conversion of the cache, and the
/// slide of a window.
const TOKENS: [i64; 14] = [3, 16, 1, 16, 16, 16, 16, 1, 16, 16, 1, 1, 16, 16];

fn session(kind: &str, config: &CacheConfig) -> Session {
    Session::new(builders(), CPU_BACKEND, kind, config.clone()).unwrap()
}

fn length(session: &Session) -> i32 {
    session.cache().lock().unwrap().length()
}

#[test]
fn a_forward_without_memory_is_refused() {
    let config = CacheConfig {
        growth: Growth::Step { step: 48 },
        ..CacheConfig::uniform(2, 1, calls::DIM as i32, 256).stored_as(KvFormat::F32)
    };
    let mut window = config.clone();
    window.max_step_tokens = 16;
    window.layers[0].policy = LayerPolicy::Window { window: 32, sinks: 4 };
    let converted = CacheConfig {
        k_format: "row-int4".parse().unwrap(),
        v_format: "row-int4".parse().unwrap(),
        quantized_kv_start: Some(64),
        ..config.clone()
    };
    for (name, kind, config) in [
        ("contiguous", ContiguousCache::KIND, &config),
        ("window", ContiguousCache::KIND, &window),
        ("converted", ContiguousCache::KIND, &converted),
        ("seq", CellsCache::SEQ, &config),
        ("tree", CellsCache::TREE, &config),
        ("seq-converted", CellsCache::SEQ, &converted),
    ] {
        let [ample, scarce] = [session(kind, config), session(kind, config)];
        let mut expected = Method::load(name, ample.key());
        let mut method = Method::load(name, scarce.key());
        let mut refused = 0;
        let mut at = 0;
        for tokens in TOKENS {
            let positions: Vec<i64> = (at..at + tokens).collect();
            let expected = expected.forward(&positions).unwrap();
            for blocks in 0.. {
                LEFT.set(Some(blocks));
                let found = method.forward(&positions);
                LEFT.set(None);
                match found {
                    Ok(found) => {
                        assert_eq!(found, expected, "{name}, positions {positions:?}");
                        break;
                    }
                    Err(error) => {
                        assert_eq!(error.status(), Status::Backend, "{name}: {error}");
                        assert!(error.message().contains("out of memory"), "{name}: {error}");
                        assert_eq!(i64::from(length(&scarce)), at, "{name}");
                        refused += 1;
                    }
                }
            }
            at += tokens;
        }
        assert!(refused >= 6, "{name}: {refused} refusals");
    }
}
