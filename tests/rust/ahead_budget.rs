//! Prefetching under a memory budget. The whole process shares the budget, so this file is a separate process with a
//! single test.

use std::sync::Arc;
use std::time::{Duration, Instant};

use etkv_core::MemoryBudget;
use etkv_file::{Labels, PrefixCache, PrefixCacheOptions, PrefixCacheReport, PrefixStore};
use etkv_tests::on_cpu::OnCpu;
use etkv_tests::texts::{answer, read, TextShape};

const MODEL: &str = "a model";

fn when_read(prefixes: &PrefixCache) -> PrefixCacheReport {
    let until = Instant::now() + Duration::from_secs(60);
    while prefixes.report().ahead_waiting > 0 {
        assert!(Instant::now() < until, "a text waits forever");
        std::thread::sleep(Duration::from_millis(5));
    }
    prefixes.report()
}

#[test]
fn texts_that_do_not_fit_are_counted_and_use_no_memory() {
    let shape = TextShape { kind: 0, windowed: false, format: 0 };
    let text: Vec<i64> = (0..90).collect();
    let folder = tempfile::TempDir::new().unwrap();
    let store = PrefixStore::open(folder.path(), u64::MAX).unwrap();
    let mut cache = shape.make::<OnCpu>();
    read::<OnCpu>(&mut cache, &text);
    store.save(&mut *cache, Labels { fingerprint: MODEL, tokens: &text }).unwrap();
    let rows = cache.memory().used;
    drop(cache);

    let store = Some(Arc::new(store));
    let prefixes = PrefixCache::new(PrefixCacheOptions { store, ..Default::default() });
    let budget = MemoryBudget::global();
    assert_eq!(budget.report().held, 0);
    let mut cache = shape.make::<OnCpu>();
    budget.set_limit(Some(rows / 2));
    assert!(prefixes.prefetch(&mut *cache, MODEL, &text).unwrap());
    let report = when_read(&prefixes);
    assert_eq!((report.ahead_read, report.ahead_failed, report.prefixes), (0, 1, 0));
    assert_eq!(budget.report().held, 0);

    budget.set_limit(None);
    assert!(prefixes.prefetch(&mut *cache, MODEL, &text).unwrap());
    let report = when_read(&prefixes);
    assert_eq!((report.ahead_read, report.ahead_failed, report.prefixes), (1, 1, 1));
    assert_eq!(budget.report().held, report.bytes);
    assert!(report.bytes >= rows);

    // A full budget reclaims the prefix, because no cache uses it.
    assert_eq!(prefixes.reclaim(1), report.bytes);
    assert_eq!(budget.report().held, 0);
    assert_eq!(prefixes.attach(&mut *cache, MODEL, &text), Ok(90));
    let mut fresh = shape.make::<OnCpu>();
    read::<OnCpu>(&mut fresh, &text);
    assert!(answer::<OnCpu>(&mut cache, &text) == answer::<OnCpu>(&mut fresh, &text));
}
