//! Prefix caches: an attached cache equals one that read the text itself. This holds whatever several threads have
//! kept, pinned, reclaimed or dropped.
//!
//! `ETKV_RUNS=N` generates N times as many operations.

use std::sync::Arc;

use etkv_core::Status;
use etkv_file::{PrefixCache, PrefixCacheOptions, PrefixStore};
use etkv_tests::backend::Backend;
use etkv_tests::on_cpu::OnCpu;
use etkv_tests::stores::{save, when_read, MODEL};
use etkv_tests::texts::{read, shared, some_text, TextShape, CONVERTED_AT};
use etkv_tests::vec_store::OnVec;
use etkv_tests::{for_seeds, runs, Rng};
use tempfile::TempDir;

fn limited(max_bytes: Option<u64>) -> PrefixCache {
    PrefixCache::new(PrefixCacheOptions { max_bytes, ..Default::default() })
}

fn unlimited() -> PrefixCache {
    limited(None)
}

/// Attaches to a prefix of a text, reads the rest, and keeps the text. The cache then continues like one that read
/// the whole text.
fn keep<B: Backend>(prefixes: &PrefixCache, shape: TextShape, text: &[i64]) -> bool {
    let mut cache = shape.make::<B>();
    prefixes.attach(&mut *cache, MODEL, text).unwrap();
    read::<B>(&mut cache, text);
    let kept = prefixes.keep(&mut *cache, MODEL, text).unwrap();
    shape.check_read::<B>(&mut cache, text);
    kept
}

/// Attaches a cache, and checks that it equals a cache that read the text itself. Returns its length.
fn attach<B: Backend>(prefixes: &PrefixCache, shape: TextShape, text: &[i64]) -> usize {
    let mut cache = shape.make::<B>();
    let n = prefixes.attach(&mut *cache, MODEL, text).unwrap();
    assert_eq!(cache.next_position(), Ok(n as i32));
    assert_eq!(cache.formats(), cache.config().formats_at(n as i32));
    shape.check_read::<B>(&mut cache, &text[..n]);
    n
}

/// A prefix cache keeps few files open, because the system limits the open files of a process.
#[cfg(target_os = "linux")]
#[test]
fn many_texts_take_few_files() {
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let (prefixes, before) = (unlimited(), files());
    for first in 0..400 {
        let text: Vec<i64> = (0..20).map(|at| first * 1000 + at).collect();
        assert!(keep::<OnCpu>(&prefixes, TextShape::of(0), &text));
    }
    assert_eq!(prefixes.report().prefixes, 400);
    // Concurrent tests also open some files.
    assert!(files() < before + 100, "{} files, and {before} before", files());
    prefixes.clear();
    assert_eq!(prefixes.report().prefixes, 0);
}

/// Returns the number of a text's tokens that can be read from a text in the prefix cache if no layer has a window.
fn served(shape: TextShape, kept: &[i64], text: &[i64]) -> usize {
    let n = shared(kept, text);
    let converted = shape.format == 2 && kept.len() >= CONVERTED_AT;
    if converted && n < CONVERTED_AT {
        0
    } else {
        n
    }
}

fn the_longest_beginning_is_found<B: Backend>() {
    for_seeds(36, |seed| {
        let shape = TextShape::of(seed);
        let rng = &mut Rng::new(seed);
        let prefixes = unlimited();
        let mut kept: Vec<Vec<i64>> = Vec::new();
        let mut pins = Vec::new();
        let mut asked = [0, 0];
        for _ in 0..30 {
            let text = some_text(rng);
            let of_kind = TextShape { kind: rng.below(3), ..shape };
            let longest = kept.iter().map(|old| served(shape, old, &text)).max().unwrap_or(0);
            let whole = kept.iter().filter(|old| text.starts_with(old)).map(Vec::len).max();
            let least = if shape.windowed { whole.unwrap_or(0) } else { longest };
            match rng.below(5) {
                0 | 1 => {
                    assert!(keep::<B>(&prefixes, of_kind, &text));
                    asked[0] += text.len() as u64;
                    asked[1] += prefixes.report().tokens_in_memory - asked[1];
                    kept.push(text);
                }
                2 => {
                    let mut cache = of_kind.make::<B>();
                    let pin = prefixes.pin(&mut *cache, MODEL, &text);
                    let has = kept.iter().any(|old| old.starts_with(&text));
                    assert!(pin.is_err() || has);
                    assert!(pin.is_ok() || kept.iter().all(|old| *old != text));
                    pins.extend(pin);
                }
                _ => {
                    let mut cache = of_kind.make::<B>();
                    let there = prefixes.n_kept(&mut *cache, MODEL, &text).unwrap();
                    let found = attach::<B>(&prefixes, of_kind, &text);
                    assert!((least..=longest).contains(&found), "{found} of {least}..={longest}");
                    assert_eq!(found, there);
                    asked[0] += text.len() as u64;
                    asked[1] += found as u64;
                }
            }
            let report = prefixes.report();
            assert_eq!([report.tokens_asked, report.tokens_in_memory], asked);
            assert!(report.prefixes <= kept.len() && (report.bytes == 0) == kept.is_empty());
        }
        drop(pins);
        let held = prefixes.report();
        assert_eq!(held.pinned, 0);
        assert_eq!(prefixes.reclaim(u64::MAX), held.bytes);
        assert_eq!((prefixes.report().prefixes, prefixes.report().bytes), (0, 0));
    });
}

fn limits_and_pins_hold<B: Backend>() {
    for_seeds(18, |seed| {
        let shape = TextShape::of(seed);
        let rng = &mut Rng::new(seed);
        let one = {
            let prefixes = unlimited();
            keep::<B>(&prefixes, shape, &(0..90).collect::<Vec<_>>());
            prefixes.report().bytes
        };
        // A backend that copies may have up to four pieces of a text.
        let max_bytes = one * 6;
        let prefixes = limited(Some(max_bytes));
        let mut pinned: Vec<(Vec<i64>, etkv_file::Pin)> = Vec::new();
        for _ in 0..40 {
            let text = some_text(rng);
            match rng.below(6) {
                0..=2 => {
                    let kept = keep::<B>(&prefixes, shape, &text);
                    assert!(kept || !pinned.is_empty());
                    // Older texts are removed to make room for the last one.
                    assert!(!kept || attach::<B>(&prefixes, shape, &text) == text.len());
                }
                3 if pinned.len() < 2 => {
                    let mut cache = shape.make::<B>();
                    if let Ok(pin) = prefixes.pin(&mut *cache, MODEL, &text) {
                        pinned.push((text, pin));
                    }
                }
                4 if !pinned.is_empty() => drop(pinned.remove(0)),
                _ => {
                    prefixes.reclaim(rng.below(2 * one as usize) as u64);
                }
            }
            assert!(prefixes.report().bytes <= max_bytes);
            assert!(prefixes.report().pinned <= pinned.len());
            for (text, _) in &pinned {
                assert_eq!(attach::<B>(&prefixes, shape, text), text.len());
            }
        }
        prefixes.clear();
        assert_eq!(prefixes.report().pinned, prefixes.report().prefixes);
        drop(pinned);
        prefixes.clear();
        assert_eq!(prefixes.report().bytes, 0);
    });
}

fn the_least_recently_used_prefix_is_removed_first<B: Backend>() {
    let shape = TextShape::PLAIN;
    let text = |first: i64| -> Vec<i64> { (first..first + 40).collect() };
    let one = {
        let prefixes = unlimited();
        keep::<B>(&prefixes, shape, &text(0));
        prefixes.report().bytes
    };
    let prefixes = limited(Some(3 * one));
    for first in [0, 100, 200] {
        assert!(keep::<B>(&prefixes, shape, &text(first)));
    }
    assert_eq!(attach::<B>(&prefixes, shape, &text(0)), 40);
    assert!(keep::<B>(&prefixes, shape, &text(300)));
    assert_eq!(prefixes.report().bytes, 3 * one);
    for (first, n) in [(0, 40), (100, 0), (200, 40), (300, 40)] {
        assert_eq!(attach::<B>(&prefixes, shape, &text(first)), n, "{first}");
    }
    // A text that is larger than the limit does not replace others.
    let long: Vec<i64> = (1000..1180).collect();
    assert!(!keep::<B>(&prefixes, shape, &long));
    assert_eq!(prefixes.report().prefixes, 3);
    // A cache that uses a prefix keeps its rows, so the prefix is not idle.
    let mut reader = shape.make::<B>();
    assert_eq!(prefixes.attach(&mut *reader, MODEL, &text(0)), Ok(40));
    assert_eq!(prefixes.reclaim(u64::MAX), 2 * one);
    assert_eq!(prefixes.report().prefixes, 1);
    prefixes.clear();
    shape.check_read::<B>(&mut reader, &text(0));
}

/// Prefixes of one text share memory, and the longest prefix replaces the others.
fn a_text_replaces_its_prefixes<B: Backend>() {
    let text: Vec<i64> = (0..160).collect();
    let shape = TextShape::PLAIN;
    let prefixes = unlimited();
    let mut cache = shape.make::<B>();
    for n in (20..=160).step_by(20) {
        read::<B>(&mut cache, &text[..n]);
        assert_eq!(prefixes.keep(&mut *cache, MODEL, &text[..n]), Ok(true));
        assert_eq!(prefixes.report().prefixes, 1);
        assert_eq!(prefixes.keep(&mut *cache, MODEL, &text[..n]), Ok(true));
    }
    for kind in 0..3 {
        assert_eq!(attach::<B>(&prefixes, TextShape { kind, ..shape }, &text[..77]), 77);
    }
    for other in [
        TextShape { windowed: true, ..shape },
        TextShape { format: 1, ..shape },
        TextShape { format: 2, ..shape },
    ] {
        assert_eq!(attach::<B>(&prefixes, other, &text), 0);
    }
    let mut empty = shape.make::<B>();
    assert_eq!(prefixes.attach(&mut *empty, "another model", &text), Ok(0));
    // With a window, a prefix can be used for texts that continue at the prefix's end, or at an earlier position at
    // which the cache was kept.
    let shape = TextShape { windowed: true, ..shape };
    let prefixes = unlimited();
    for n in [50, 100] {
        keep::<B>(&prefixes, shape, &text[..n]);
    }
    for (n, found) in [(30, 0), (50, 50), (60, 50), (100, 100), (150, 100)] {
        assert_eq!(attach::<B>(&prefixes, shape, &text[..n]), found);
    }
}

fn invalid_arguments_are_refused<B: Backend>() {
    let prefixes = unlimited();
    let text: Vec<i64> = (0..60).collect();
    let shape = TextShape { kind: 1, ..TextShape::PLAIN };
    let mut cache = shape.with_text::<B>(&text);
    let told = |result: etkv_core::Result<bool>, told: &str| {
        let error = result.unwrap_err();
        assert_eq!(error.status(), Status::InvalidArgument);
        assert!(error.message().contains(told), "{error}");
    };
    told(prefixes.keep(&mut *cache, "", &text), "the fingerprint is empty");
    told(
        prefixes.keep(&mut *cache, MODEL, &text[..50]),
        "holds 60 positions, and the text has 50 tokens",
    );
    told(prefixes.attach(&mut *cache, MODEL, &text).map(|_| true), "holds 60 positions; clear it");
    told(
        prefixes.pin(&mut *cache, MODEL, &text).map(|_| true),
        "no prefix in memory has this text of 60 tokens",
    );
    let all = cache.sequences_mut().unwrap();
    all.seq_cp(0, 3, 0..i32::MAX).unwrap();
    told(prefixes.keep(&mut *cache, MODEL, &text), "sequences");
    assert_eq!(prefixes.report().prefixes, 0);
    let mut empty = shape.make::<B>();
    told(prefixes.keep(&mut *empty, MODEL, &[]), "the text has 0 tokens");
    let mut converted = TextShape::PLAIN.with_text::<B>(&text);
    let format = "affine8g32".parse().unwrap();
    converted.convert(format, format).unwrap();
    assert_eq!(prefixes.keep(&mut *converted, MODEL, &text), Ok(false));
}

fn threads_share_one<B: Backend>() {
    let prefixes = limited(Some(300_000));
    let threads = (0..4).map(|thread| {
        let prefixes = prefixes.clone();
        std::thread::spawn(move || {
            let rng = &mut Rng::new(thread);
            for _ in 0..runs(60) {
                let (shape, text) = (TextShape::of(rng.next_u64() % 6), some_text(rng));
                match rng.below(8) {
                    0..=2 => drop(keep::<B>(&prefixes, shape, &text)),
                    3..=5 => drop(attach::<B>(&prefixes, shape, &text)),
                    6 => drop(prefixes.reclaim(rng.below(100_000) as u64)),
                    _ => {
                        let mut cache = shape.make::<B>();
                        let Ok(pin) = prefixes.pin(&mut *cache, MODEL, &text) else { continue };
                        assert_eq!(attach::<B>(&prefixes, shape, &text), text.len());
                        drop(pin);
                    }
                }
            }
        })
    });
    threads.collect::<Vec<_>>().into_iter().for_each(|thread| thread.join().unwrap());
    prefixes.clear();
    assert_eq!(prefixes.report().bytes, 0);
}

/// A store that fails is skipped.
fn a_store_that_fails_is_passed_by<B: Backend>() {
    let folder = TempDir::new().unwrap();
    let store = Arc::new(PrefixStore::open(&folder.path().join("gone"), u64::MAX).unwrap());
    std::fs::remove_dir(store.path()).unwrap();
    let store = Some(store);
    let prefixes = PrefixCache::new(PrefixCacheOptions { store, ..Default::default() });
    let shape = TextShape::of(0);
    let text: Vec<i64> = (0..60).collect();
    assert!(keep::<B>(&prefixes, shape, &text));
    assert_eq!(attach::<B>(&prefixes, shape, &text), 60);
}

macro_rules! tests {
    ($($test:ident,)+) => {
        mod on_vec {
            $(
                #[test]
                fn $test() {
                    super::$test::<super::OnVec>();
                }
            )+
        }

        mod on_cpu {
            $(
                #[test]
                fn $test() {
                    super::$test::<super::OnCpu>();
                }
            )+
        }
    };
}

tests! {
    the_longest_beginning_is_found,
    limits_and_pins_hold,
    the_least_recently_used_prefix_is_removed_first,
    a_text_replaces_its_prefixes,
    invalid_arguments_are_refused,
    threads_share_one,
    a_store_that_fails_is_passed_by,
}

/// A text that one process kept is found in the store by another process, which then shares it in memory.
#[test]
fn texts_missing_in_memory_come_from_the_store() {
    for_seeds(18, |seed| {
        let shape = TextShape::of(seed);
        let folder = TempDir::new().unwrap();
        let open = || {
            let store = Some(Arc::new(PrefixStore::open(folder.path(), u64::MAX).unwrap()));
            PrefixCache::new(PrefixCacheOptions { store, ..Default::default() })
        };
        let text: Vec<i64> = (0..120).collect();
        let first = open();
        assert!(keep::<OnCpu>(&first, shape, &text[..60]));
        assert!(keep::<OnCpu>(&first, shape, &text[..20]));
        assert_eq!(first.store().unwrap().usage().unwrap().0, 1);
        let second = open();
        let mut cache = shape.make::<OnCpu>();
        assert_eq!(second.n_kept(&mut *cache, MODEL, &text), Ok(60));
        assert_eq!(attach::<OnCpu>(&second, shape, &text), 60);
        assert_eq!(second.report().tokens_in_store, 60);
        assert!(second.report().prefixes == 1 && second.report().bytes > 0);
        // Now the text comes from memory. This also works for other kinds of caches, which could not load the file.
        for kind in 0..3 {
            assert_eq!(attach::<OnCpu>(&second, TextShape { kind, ..shape }, &text), 60);
        }
        let report = second.report();
        assert_eq!((report.tokens_in_memory, report.tokens_in_store), (180, 60));
        assert_eq!(report.tokens_asked, 480);
        // The longer prefix is used, whether it is in memory or in the store.
        assert!(keep::<OnCpu>(&first, shape, &text[..90]));
        assert_eq!(attach::<OnCpu>(&second, shape, &text), 90);
        assert_eq!(second.report().tokens_in_store, 150);
    });
}

/// Caches on one prefix use the memory of one cache, plus the memory of their continuations.
#[test]
fn shared_prefixes_are_in_memory_once() {
    let shape = TextShape::PLAIN;
    let text: Vec<i64> = (0..160).collect();
    let prefixes = unlimited();
    let mut cache = shape.make::<OnCpu>();
    let mut bytes = 0;
    for n in (40..=160).step_by(40) {
        read::<OnCpu>(&mut cache, &text[..n]);
        assert_eq!(prefixes.keep(&mut *cache, MODEL, &text[..n]), Ok(true));
        let held = prefixes.report().bytes;
        assert!(held > bytes);
        bytes = held;
    }
    // The bytes of the rows, once, and of the padding to whole pages. There are two layers; keys and values each have
    // two heads of 32 numbers of 16 bits.
    let rows = 160 * 2 * 2 * 2 * 32 * 2;
    assert!((rows..2 * rows).contains(&bytes), "{bytes} for {rows}");
    let all: Vec<_> = (0..8)
        .map(|_| {
            let mut cache = shape.make::<OnCpu>();
            assert_eq!(prefixes.attach(&mut *cache, MODEL, &text), Ok(160));
            assert!(cache.memory().shared >= rows, "{:?}", cache.memory());
            cache
        })
        .collect();
    drop(cache);
    assert_eq!(prefixes.reclaim(1), 0);
    drop(all);
    assert_eq!(prefixes.reclaim(1), bytes);
}

/// Returns a store with texts in a folder, and a prefix cache that reads from it.
fn with_store(max_bytes: Option<u64>, texts: &[&[i64]]) -> (TempDir, PrefixCache) {
    let folder = TempDir::new().unwrap();
    let store = PrefixStore::open(&folder.path().join("texts"), u64::MAX).unwrap();
    for text in texts {
        save(&store, TextShape::PLAIN, text);
    }
    let options = PrefixCacheOptions { max_bytes, store: Some(Arc::new(store)) };
    (folder, PrefixCache::new(options))
}

fn prefetch(prefixes: &PrefixCache, text: &[i64]) -> bool {
    prefixes.prefetch(&mut *TextShape::PLAIN.make::<OnCpu>(), MODEL, text).unwrap()
}

/// Waits until no text is queued. Returns the number of texts that were prefetched, the number of their tokens, and
/// the number of failures.
fn read_ahead(prefixes: &PrefixCache) -> [u64; 3] {
    let report = when_read(prefixes);
    [report.ahead_read, report.tokens_ahead, report.ahead_failed]
}

#[test]
fn texts_that_were_read_ahead_are_in_memory() {
    let text: Vec<i64> = (0..90).collect();
    let (folder, prefixes) = with_store(None, &[&text]);
    let asked = &text[..80];
    assert!(prefetch(&prefixes, asked));
    assert_eq!(read_ahead(&prefixes), [1, 80, 0]);
    // The text is in memory now, so it is not queued again.
    assert!(!prefetch(&prefixes, asked));
    let mut longer = asked.to_vec();
    longer.push(1000);
    assert!(prefetch(&prefixes, &longer));
    assert_eq!(read_ahead(&prefixes), [1, 80, 0]);
    assert!(!prefetch(&prefixes, &longer));
    // The store is not queried: it would fail.
    std::fs::remove_dir_all(folder.path().join("texts")).unwrap();
    assert_eq!(attach::<OnCpu>(&prefixes, TextShape::PLAIN, asked), 80);
    assert_eq!(attach::<OnCpu>(&prefixes, TextShape::PLAIN, &longer), 80);
    let report = prefixes.report();
    assert_eq!((report.tokens_in_memory, report.tokens_in_store), (160, 0));
    // Kinds share the texts in memory.
    for kind in [1, 2] {
        assert_eq!(attach::<OnCpu>(&prefixes, TextShape { kind, ..TextShape::PLAIN }, asked), 80);
    }
}

#[test]
fn texts_removed_from_memory_are_read_again() {
    let text: Vec<i64> = (0..90).collect();
    let (_folder, prefixes) = with_store(None, &[&text]);
    assert!(prefetch(&prefixes, &text));
    assert_eq!(read_ahead(&prefixes), [1, 90, 0]);
    prefixes.clear();
    assert_eq!(attach::<OnCpu>(&prefixes, TextShape::PLAIN, &text), 90);
    assert_eq!(prefixes.report().tokens_in_store, 90);
    prefixes.clear();
    assert!(prefetch(&prefixes, &text));
    assert_eq!(read_ahead(&prefixes), [2, 180, 0]);
}

#[test]
fn failed_prefetches_are_counted() {
    let text: Vec<i64> = (0..90).collect();
    // A cache without a store, and a text that is not in the store.
    assert!(!prefetch(&unlimited(), &text));
    let (folder, prefixes) = with_store(None, &[&text]);
    assert!(prefetch(&prefixes, &[5; 50]));
    assert_eq!(read_ahead(&prefixes), [0, 0, 0]);
    let error = prefixes.prefetch(&mut *TextShape::PLAIN.make::<OnCpu>(), "", &text).unwrap_err();
    assert_eq!(error.status(), Status::InvalidArgument);

    // A file whose damage is only found on loading, and a folder that was removed.
    let texts = folder.path().join("texts");
    let file = std::fs::read_dir(&texts).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&file).unwrap();
    let at = bytes.len() - 1000;
    bytes[at] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    assert!(prefetch(&prefixes, &text));
    assert_eq!(read_ahead(&prefixes), [0, 0, 1]);
    std::fs::remove_dir_all(&texts).unwrap();
    assert!(prefetch(&prefixes, &text));
    assert_eq!(read_ahead(&prefixes), [0, 0, 2]);
    assert_eq!(attach::<OnCpu>(&prefixes, TextShape::PLAIN, &text), 0);

    // A text that exceeds the memory limit can still be loaded from the store.
    let (_folder, small) = with_store(Some(100), &[&text]);
    assert!(prefetch(&small, &text));
    assert_eq!(read_ahead(&small), [0, 0, 1]);
    assert_eq!((small.report().prefixes, small.report().bytes), (0, 0));
    assert_eq!(attach::<OnCpu>(&small, TextShape::PLAIN, &text), 90);
    assert_eq!(small.report().tokens_in_store, 90);
}

/// When many texts are requested, some wait and the others are refused. Dropping the prefix cache waits only for the
/// text that is being read.
#[test]
fn as_many_texts_wait_as_may() {
    let texts: Vec<Vec<i64>> = (0..60).map(|first| (first..first + 40).collect()).collect();
    let given: Vec<&[i64]> = texts.iter().map(Vec::as_slice).collect();
    let (_folder, prefixes) = with_store(None, &given);
    let waited = texts.iter().filter(|text| prefetch(&prefixes, text)).count();
    assert!(waited >= 16, "{waited}");
    assert_eq!(read_ahead(&prefixes)[0], waited as u64);
    assert_eq!(prefixes.report().prefixes, waited);
    prefixes.clear();
    for text in &texts {
        prefetch(&prefixes, text);
    }
    drop(prefixes);
}
