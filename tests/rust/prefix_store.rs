//! Stores of texts: a loaded cache equals one that read the text itself. This holds whatever several processes have
//! stored, removed or damaged, and after one of them was killed.
//!
//! `ETKV_RUNS=N` generates N times as many operations, kills and seconds.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, SystemTime};

use etkv_core::{CacheConfig, ContiguousCache, LayerPolicy, Status};
use etkv_cpu::CpuStore;
use etkv_file::{Labels, PrefixStore, MIN_TOKENS};
use etkv_tests::campaign::saving::driver;
use etkv_tests::on_cpu::OnCpu;
use etkv_tests::stores::{labels, load, save, start, store_and_load, MODEL};
use etkv_tests::texts::{answer, config, read, shared, some_text, TextShape};
use etkv_tests::{for_seeds, runs, Rng};
use tempfile::TempDir;

type AnyCache = driver::AnyCache<OnCpu>;

fn files(folder: &Path) -> Vec<PathBuf> {
    let all = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<PathBuf> =
        all.filter(|path| path.extension().is_some_and(|end| end == "safetensors")).collect();
    all.sort();
    all
}

#[test]
fn the_longest_beginning_is_loaded() {
    for_seeds(40, |seed| {
        let shape = TextShape::of(seed % 6);
        let rng = &mut Rng::new(seed);
        let folder = TempDir::new().unwrap();
        let open = || PrefixStore::open(&folder.path().join("a/b"), u64::MAX).unwrap();
        let mut stores = [open(), open()];
        let mut saved: Vec<Vec<i64>> = Vec::new();
        for _ in 0..30 {
            let text = some_text(rng);
            let which = rng.below(2);
            match rng.below(5) {
                0 => stores[which] = open(),
                1 | 2 => {
                    let has = saved.iter().any(|old| old.starts_with(&text));
                    let written = save(&stores[which], shape, &text);
                    assert!(!written || text.len() >= MIN_TOKENS);
                    // With a window a text may have to be stored again at another length.
                    assert!(written || text.len() < MIN_TOKENS || has);
                    assert!(!(written && has && !shape.windowed));
                    if text.len() >= MIN_TOKENS {
                        saved.push(text);
                    }
                }
                _ => {
                    let found = load(&stores[which], shape, &text);
                    let longest = saved.iter().map(|old| shared(old, &text)).max().unwrap_or(0);
                    let whole = saved.iter().filter(|old| text.starts_with(old)).map(Vec::len);
                    let (least, most) = match shape.windowed {
                        true => (whole.max().unwrap_or(0), longest),
                        false => (longest, longest),
                    };
                    let served = |n| if n < MIN_TOKENS { 0 } else { n };
                    assert!((served(least)..=served(most)).contains(&found), "{found}");
                    let cache = shape.make::<OnCpu>();
                    assert_eq!(stores[1 - which].n_stored(&*cache, MODEL, &text), Ok(found));
                }
            }
        }
        let (n, bytes) = stores[0].usage().unwrap();
        assert_eq!(n, files(stores[0].path()).len());
        assert!(n <= saved.len() && (n == 0) == (bytes == 0));
    });
}

#[test]
fn a_text_replaces_its_prefixes() {
    let folder = TempDir::new().unwrap();
    let store = PrefixStore::open(folder.path(), u64::MAX).unwrap();
    let shape = TextShape::PLAIN;
    let text: Vec<i64> = (0..100).collect();
    for n in [40, 70, 100] {
        assert!(save(&store, shape, &text[..n]));
        assert_eq!(files(folder.path()).len(), 1);
    }
    // The store already has these texts, but a text that differs is a new file.
    assert!(!save(&store, shape, &text[..70]));
    let mut other = text.clone();
    other[50] = 0;
    assert!(save(&store, shape, &other));
    assert_eq!(files(folder.path()).len(), 2);
    assert_eq!(load(&store, shape, &other[..60]), 60);
    // Caches of another kind, of other layers or of another model do not find the text.
    for other in [TextShape { kind: 1, ..shape }, TextShape { windowed: true, ..shape }] {
        assert_eq!(load(&store, other, &text), 0);
    }
    let mut cache = shape.make::<OnCpu>();
    assert_eq!(store.load(&mut *cache, "another model", &text), Ok(0));
}

#[test]
fn the_least_recently_used_file_is_removed_first() {
    let folder = TempDir::new().unwrap();
    let shape = TextShape::PLAIN;
    let text = |first: i64| -> Vec<i64> { (first..first + 40).collect() };
    let one = {
        let store = PrefixStore::open(folder.path(), u64::MAX).unwrap();
        assert!(save(&store, shape, &text(0)));
        store.usage().unwrap().1
    };
    let pause = || std::thread::sleep(Duration::from_millis(15));
    let store = PrefixStore::open(folder.path(), 3 * one).unwrap();
    for first in [100, 200] {
        pause();
        assert!(save(&store, shape, &text(first)));
    }
    pause();
    assert_eq!(load(&store, shape, &text(0)), 40);
    pause();
    assert!(save(&store, shape, &text(300)));
    assert_eq!(store.usage(), Ok((3, 3 * one)));
    for (first, n) in [(0, 40), (100, 0), (200, 40), (300, 40)] {
        assert_eq!(load(&store, shape, &text(first)), n, "{first}");
    }
    // A text that is itself larger than the folder's limit.
    let small = PrefixStore::open(folder.path(), one / 2).unwrap();
    assert!(!save(&small, shape, &text(400)));
    assert_eq!(store.usage(), Ok((3, 3 * one)));
}

#[test]
fn damaged_and_foreign_files_are_skipped() {
    let folder = TempDir::new().unwrap();
    let shape = TextShape::PLAIN;
    let text: Vec<i64> = (0..90).collect();
    let mut other = text[..50].to_vec();
    other.push(7);
    let store = PrefixStore::open(folder.path(), u64::MAX).unwrap();
    assert!(save(&store, shape, &other));
    let [short] = &files(folder.path())[..] else { panic!() };
    assert!(save(&store, shape, &text));
    let long = files(folder.path()).into_iter().find(|path| path != short).unwrap();
    let nothing = format!("prefix-{:032x}.safetensors", 7);
    std::fs::write(folder.path().join(nothing), b"no cache").unwrap();
    std::fs::write(folder.path().join("prefix-tuning.safetensors"), b"not ours").unwrap();
    std::fs::write(folder.path().join("other.txt"), b"not ours").unwrap();
    std::fs::create_dir(folder.path().join("prefix-folder.safetensors")).unwrap();

    // Damages the rows, which only a load reads.
    let mut bytes = std::fs::read(&long).unwrap();
    let at = bytes.len() - 1000;
    bytes[at] ^= 1;
    std::fs::write(&long, &bytes).unwrap();
    assert_eq!(load(&store, shape, &text), 50);
    assert_eq!(load(&PrefixStore::open(folder.path(), u64::MAX).unwrap(), shape, &text), 50);
    // The text is stored again under its name.
    assert!(save(&store, shape, &text));
    assert_eq!(load(&store, shape, &text), 90);
    std::fs::remove_file(&long).unwrap();
    assert_eq!(load(&store, shape, &text), 50);
    assert!(folder.path().join("other.txt").exists());

    let mut cache = shape.with_text::<OnCpu>(&text[..40]);
    let refused = store.load(&mut *cache, MODEL, &text).unwrap_err();
    assert_eq!(refused.status(), Status::InvalidArgument);
    let refused = store.save(&mut *cache, labels(&text)).unwrap_err();
    assert!(refused.message().contains("holds 40 positions, and the text has 90 tokens"));
    let refused = PrefixStore::open(short, 1).unwrap_err();
    assert_eq!(refused.status(), Status::File);
}

/// A cache is not stored if its contents are not a text, or if they are no longer in the formats of the config.
#[test]
fn only_texts_are_stored() {
    let folder = TempDir::new().unwrap();
    let store = PrefixStore::open(folder.path(), u64::MAX).unwrap();
    let text: Vec<i64> = (0..60).collect();
    let refused = |cache: &mut AnyCache, told: &str| {
        let error = store.save(&mut **cache, labels(&text)).unwrap_err();
        assert_eq!(error.status(), Status::InvalidArgument);
        assert!(error.message().contains(told), "{error}");
    };
    for kind in [1, 2] {
        let shape = TextShape { kind, ..TextShape::PLAIN };
        let mut cache = shape.with_text::<OnCpu>(&text);
        cache.sequences_mut().unwrap().seq_rm(0, 20..30).unwrap();
        refused(&mut cache, "holds 50 positions up to 60");

        let mut cache = shape.with_text::<OnCpu>(&text);
        let all = cache.sequences_mut().unwrap();
        all.seq_cp(0, 3, 0..i32::MAX).unwrap();
        refused(&mut cache, "holds 2 sequences");
        cache.sequences_mut().unwrap().seq_keep(3).unwrap();
        refused(&mut cache, "expected a cache with sequence 0 only, got the sequences [3]");
    }
    let mut cache = TextShape { kind: 2, ..TextShape::PLAIN }.with_text::<OnCpu>(&text);
    cache.trees_mut().unwrap().propose(0, &[-1, 0]).unwrap();
    refused(&mut cache, "2 candidates");

    let mut cache = TextShape::PLAIN.with_text::<OnCpu>(&text);
    cache.convert("f32".parse().unwrap(), "f32".parse().unwrap()).unwrap();
    assert_eq!(store.save(&mut *cache, labels(&text)), Ok(false));
    let unnamed = Labels { fingerprint: "", tokens: &text };
    for error in [
        store.save(&mut *cache, unnamed).unwrap_err(),
        store.load(&mut *TextShape::PLAIN.make::<OnCpu>(), "", &text).unwrap_err(),
    ] {
        assert!(error.message().contains("the fingerprint is empty"), "{error}");
    }
    assert_eq!(files(folder.path()).len(), 0);
}

/// Only caches that are at least as large as the file's text and would have the same formats can use the file.
#[test]
fn files_of_other_capacities_or_formats_are_not_loaded() {
    let folder = TempDir::new().unwrap();
    let store = PrefixStore::open(folder.path(), u64::MAX).unwrap();
    let make = |capacity, quantized_kv_start| -> AnyCache {
        let config = CacheConfig {
            float_format: "f32".parse().unwrap(),
            quantized_kv_start,
            ..config(capacity).stored_as("row-int4".parse().unwrap())
        };
        Box::new(ContiguousCache::<CpuStore>::new(config).unwrap())
    };
    let text: Vec<i64> = (0..90).collect();
    let save = |mut cache: AnyCache, text: &[i64]| {
        read::<OnCpu>(&mut cache, text);
        store.save(&mut *cache, labels(text)).unwrap()
    };
    let load = |mut cache: AnyCache, text: &[i64]| store.load(&mut *cache, MODEL, text).unwrap();
    // A longer text does not replace a text that smaller caches can use, and does not make it unnecessary.
    assert!(save(make(64, None), &text[..50]));
    assert!(save(make(200, None), &text));
    assert_eq!(files(folder.path()).len(), 2);
    assert_eq!(load(make(64, None), &text), 50);
    assert_eq!(load(make(200, None), &text), 90);
    std::fs::remove_file(&files(folder.path())[0]).unwrap();
    std::fs::remove_file(&files(folder.path())[0]).unwrap();
    assert!(save(make(200, None), &text));
    assert!(save(make(64, None), &text[..50]));

    // At or above `quantized_kv_start` the rows are converted. Below it they are not.
    assert!(save(make(200, Some(60)), &text));
    assert_eq!(load(make(200, Some(60)), &text), 90);
    assert_eq!(load(make(200, Some(60)), &text[..70]), 70);
    assert_eq!(load(make(200, Some(60)), &text[..50]), 0);
    assert!(save(make(200, Some(60)), &text[..50]));
    assert_eq!(load(make(200, Some(60)), &text[..55]), 50);
}

/// The slots of windows and chunks depend on the capacity, so a file is used only by caches of the same capacity.
#[test]
fn caches_of_other_capacities_have_texts_of_their_own() {
    for policy in [LayerPolicy::Window { window: 12, sinks: 2 }, LayerPolicy::Chunk { chunk: 12 }] {
        let folder = TempDir::new().unwrap();
        let store = PrefixStore::open(folder.path(), u64::MAX).unwrap();
        let make = |capacity| -> AnyCache {
            let mut config = config(capacity);
            config.layers[1].policy = policy;
            Box::new(ContiguousCache::<CpuStore>::new(config).unwrap())
        };
        let text: Vec<i64> = (0..90).collect();
        for capacity in [200, 300] {
            let mut cache = make(capacity);
            read::<OnCpu>(&mut cache, &text);
            assert!(store.save(&mut *cache, labels(&text)).unwrap(), "{policy} of {capacity}");
            let mut other = make(capacity);
            assert_eq!(store.load(&mut *other, MODEL, &text).unwrap(), 90, "{policy}");
            assert_eq!(answer::<OnCpu>(&mut other, &text), answer::<OnCpu>(&mut cache, &text));
        }
    }
}

/// An address is not treated as a folder, even in a library that cannot open it.
#[cfg(not(feature = "buckets"))]
#[test]
fn a_bucket_is_refused_without_the_feature() {
    let error = PrefixStore::open(Path::new("s3://a-bucket/texts"), 1).unwrap_err();
    assert_eq!(error.status(), Status::Unsupported);
    for words in ["s3://a-bucket/texts", "built without buckets", "ETKV_BUCKETS=ON"] {
        assert!(error.message().contains(words), "{error}");
    }
}

#[test]
fn incomplete_files_are_removed() {
    let folder = TempDir::new().unwrap();
    let [old, new] = ["old", "new"].map(|name| folder.path().join(format!(".etkv-{name}.part")));
    for path in [&old, &new] {
        std::fs::write(path, b"a piece").unwrap();
    }
    let hours_ago = SystemTime::now() - Duration::from_secs(2 * 3600);
    std::fs::File::options().append(true).open(&old).unwrap().set_modified(hours_ago).unwrap();
    PrefixStore::open(folder.path(), 1).unwrap();
    assert!(!old.exists() && new.exists());
}

/// The body of the processes that other tests start.
#[test]
#[ignore = "other tests run it in separate processes"]
fn a_process_stores_and_loads() {
    store_and_load(|folder, max_bytes| PrefixStore::open(Path::new(folder), max_bytes).unwrap());
}

#[test]
fn several_processes_use_one_folder() {
    let folder = TempDir::new().unwrap();
    let seconds = 0.05 * runs(40) as f64;
    let mut all: Vec<Child> = (0..2).map(|_| start(folder.path(), seconds)).collect();
    for child in &mut all {
        assert!(child.wait().unwrap().success());
    }
    // A process that runs no test also succeeds.
    assert!(!files(folder.path()).is_empty(), "the processes stored nothing");
    check_all(folder.path());
    // Each process removes the excess when it stores a file, but both may store a file at the same time.
    let (_, bytes) = PrefixStore::open(folder.path(), 1).unwrap().usage().unwrap();
    assert!(bytes < 500_000, "{bytes}");
}

#[test]
fn a_killed_process_leaves_whole_files() {
    let folder = TempDir::new().unwrap();
    let rng = &mut Rng::new(3);
    for _ in 0..runs(40) {
        let mut child = start(folder.path(), 60.0);
        std::thread::sleep(Duration::from_millis(10 + rng.below(40) as u64));
        child.kill().unwrap();
        child.wait().unwrap();
        check_all(folder.path());
    }
    assert!(!files(folder.path()).is_empty());
}

/// Checks that every file equals a cache that read its text.
fn check_all(folder: &Path) {
    for path in files(folder) {
        let right = (0..6).map(TextShape::of).any(|shape| {
            let mut cache = shape.make::<OnCpu>();
            let Ok(text) = etkv_file::load(&mut *cache, &path, MODEL) else { return false };
            shape.check_read::<OnCpu>(&mut cache, &text);
            true
        });
        assert!(right, "{}", path.display());
    }
}
