//! The memory that sessions on one prefix use. It is measured for the whole process, so this file is a separate
//! process with a single test.
//!
//! `cargo test -p etkv-tests --test prefix_memory -- --nocapture` prints the figures.
#![cfg(target_os = "linux")]

use etkv_core::{AttendCache, Cache, CacheConfig, ContiguousCache, Growth, MemoryBudget, Step};
use etkv_cpu::{CpuStore, Tensor};
use etkv_file::{PrefixCache, PrefixCacheOptions};
use etkv_tests::backend::Backend;
use etkv_tests::on_cpu::OnCpu;

const MODEL: &str = "a model";
const LAYERS: usize = 8;
const HEADS: usize = 4;
const DIM: usize = 64;
const PREFIX: usize = 4096;
const TAIL: usize = 64;
const SESSIONS: usize = 8;
/// The bytes of a position: its keys and values in all layers, with 16 bits for each number.
const POSITION: u64 = (LAYERS * 2 * HEADS * DIM * 2) as u64;

/// Returns the proportional set size of the process, in which pages that are mapped several times count once.
fn pss() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 1024
}

fn make() -> ContiguousCache<CpuStore> {
    let config = CacheConfig {
        growth: Growth::Step { step: 64 },
        ..CacheConfig::uniform(LAYERS, HEADS as i32, DIM as i32, 8192)
    };
    ContiguousCache::new(config).unwrap()
}

/// Reads `n` tokens after those in the cache, and attends to all of them.
fn read(cache: &mut ContiguousCache<CpuStore>, n: usize) {
    const MAX: usize = 256;
    let end = cache.length() as usize + n;
    while (cache.length() as usize) < end {
        let start = cache.length() as usize;
        let n = MAX.min(end - start);
        let cache: &mut dyn AttendCache<Store = CpuStore> = cache;
        let positions: Vec<i32> = (start as i32..(start + n) as i32).collect();
        let mut step = Step::begin(cache, &positions).unwrap();
        for layer in 0..LAYERS {
            let value = |at: usize| ((start * 31 + layer * 7 + at) % 97) as f32 / 97.0;
            let values: Vec<f32> = (0..n * HEADS * DIM).map(value).collect();
            let shape = [1, HEADS as i32, n as i32, DIM as i32];
            let kv = Tensor::new(shape, values.clone()).unwrap();
            let spec = step.update_and_fetch(layer, &kv, &kv).unwrap();
            // A single query is enough: the memory that is read counts, not how often it is read.
            let q: Vec<f32> = values[..HEADS * DIM].to_vec();
            let q = Tensor::new([1, HEADS as i32, 1, DIM as i32], q).unwrap();
            OnCpu::attend(&q, &spec, 0.125).unwrap();
        }
        step.commit(&[]).unwrap();
    }
}

#[test]
fn sessions_on_one_prefix_take_the_memory_of_one() {
    let prefixes = PrefixCache::new(PrefixCacheOptions::default());
    let text: Vec<i64> = (0..PREFIX as i64).collect();
    // Includes other memory of the process, such as the threads' workspaces.
    read(&mut make(), 512);
    let held = || MemoryBudget::global().report().held;
    let (pss_before, held_before) = (pss(), held());

    let mut first = make();
    read(&mut first, PREFIX);
    assert_eq!(prefixes.keep(&mut first, MODEL, &text), Ok(true));
    read(&mut first, TAIL);
    let (pss_of_one, held_of_one) = (pss() - pss_before, held() - held_before);

    let others: Vec<_> = (1..SESSIONS)
        .map(|_| {
            let mut cache = make();
            assert_eq!(prefixes.attach(&mut cache, MODEL, &text), Ok(PREFIX));
            read(&mut cache, TAIL);
            cache
        })
        .collect();
    let (pss_of_all, held_of_all) = (pss() - pss_before, held() - held_before);
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!(
        "{PREFIX} tokens of {POSITION} bytes, and {TAIL} of each session; MiB of one and of {SESSIONS} sessions: \
         pss {:.1} and {:.1}, budget {:.1} and {:.1}",
        mib(pss_of_one),
        mib(pss_of_all),
        mib(held_of_one),
        mib(held_of_all)
    );
    let tails = (SESSIONS - 1) as u64 * TAIL as u64 * POSITION;
    for (of_one, of_all) in [(pss_of_one, pss_of_all), (held_of_one, held_of_all)] {
        assert!(of_one >= PREFIX as u64 * POSITION);
        assert!(of_all as f64 <= 1.2 * of_one as f64 + tails as f64, "{of_all} for {of_one}");
    }
    drop((first, others));
}
