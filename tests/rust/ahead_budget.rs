//! Prefetching under a memory budget. The whole process shares the budget, so this file is a separate process with a
//! single test.

use std::sync::Arc;

use etkv_core::MemoryBudget;
use etkv_file::{PrefixCache, PrefixCacheOptions, PrefixStore};
use etkv_tests::on_cpu::OnCpu;
use etkv_tests::stores::{labels, when_read, MODEL};
use etkv_tests::texts::TextShape;

#[test]
fn texts_that_do_not_fit_are_counted_and_use_no_memory() {
    let shape = TextShape::PLAIN;
    let text: Vec<i64> = (0..90).collect();
    let folder = tempfile::TempDir::new().unwrap();
    let store = PrefixStore::open(folder.path(), u64::MAX).unwrap();
    let mut cache = shape.with_text::<OnCpu>(&text);
    store.save(&mut *cache, labels(&text)).unwrap();
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
    shape.check_read::<OnCpu>(&mut cache, &text);
}
