//! Stores of texts: a loaded cache equals one that read the text itself. This holds whatever several processes have
//! stored, removed or damaged, and after one of them was killed.
//!
//! `ETKV_RUNS=N` generates N times as many operations, kills and seconds.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant, SystemTime};

use etkv_core::{AttendCache, CacheConfig, CellsCache, ContiguousCache, LayerPolicy, Status, Step};
use etkv_cpu::CpuStore;
use etkv_file::{Labels, PrefixStore, MIN_TOKENS};
use etkv_tests::backend::Backend;
use etkv_tests::on_cpu::OnCpu;
use etkv_tests::{for_seeds, oracle, runs, Rng};
use tempfile::TempDir;

type AnyCache = Box<dyn AttendCache<Store = CpuStore>>;

const LAYERS: usize = 2;
const HEADS: usize = 2;
const DIM: usize = 16;
const MODEL: &str = "a model";

/// A kind of cache, with or without a window in its second layer.
#[derive(Debug, Clone, Copy)]
struct Shape {
    kind: usize,
    windowed: bool,
}

impl Shape {
    fn of(seed: u64) -> Self {
        Self { kind: (seed % 3) as usize, windowed: seed / 3 % 2 == 1 }
    }

    fn make(self) -> AnyCache {
        let mut config = CacheConfig {
            max_step_tokens: 8,
            ..CacheConfig::uniform(LAYERS, HEADS as i32, DIM as i32, 200)
        };
        if self.windowed {
            config.layers[1].policy = LayerPolicy::Window { window: 12, sinks: 2 };
        }
        match self.kind {
            0 => Box::new(ContiguousCache::<CpuStore>::new(config).unwrap()),
            1 => Box::new(CellsCache::<CpuStore>::new(config).unwrap()),
            _ => Box::new(CellsCache::<CpuStore>::with_trees(config).unwrap()),
        }
    }
}

/// Reads the tokens of a text after those in the cache. Keys and values of a token are a function of the text up to
/// it. Returns the bits of the rows that the last step's queries see.
fn read(cache: &mut AnyCache, text: &[i64]) -> Vec<u32> {
    let mut bits = Vec::new();
    loop {
        let start = cache.next_position().unwrap() as usize;
        // Steps end at the same tokens, whatever the number of tokens in the cache is at the start.
        let end = text.len().min((start / 8 + 1) * 8);
        if start == end {
            return bits;
        }
        bits = step(cache, text, start, end);
    }
}

fn step(cache: &mut AnyCache, text: &[i64], start: usize, end: usize) -> Vec<u32> {
    let seed_of = |at: usize| {
        text[..=at].iter().fold(17u64, |hash, &token| {
            (hash ^ token as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
        })
    };
    let positions: Vec<i32> = (start as i32..end as i32).collect();
    let mut bits = Vec::new();
    let mut step = Step::begin(&mut **cache, &positions).unwrap();
    for layer in 0..LAYERS {
        let [q, k, v] = [0, 1, 2].map(|which| {
            let row = |at| {
                let mut rng = Rng::new(seed_of(at) ^ (layer * 3 + which) as u64);
                oracle::random_rows(&mut rng, 1, HEADS, DIM).remove(0)
            };
            OnCpu::tensor(&(start..end).map(row).collect::<Vec<_>>())
        });
        let spec = step.update_and_fetch(layer, &k, &v).unwrap();
        let out = OnCpu::attend(&q, &spec, 0.3).unwrap();
        drop(spec);
        bits.extend(OnCpu::rows(&out).iter().flatten().flatten().map(|value| value.to_bits()));
    }
    step.commit(&[]).unwrap();
    bits
}

/// Returns the values that the query of one more token sees.
fn answer(cache: &mut AnyCache, text: &[i64]) -> Vec<u32> {
    let mut longer = text.to_vec();
    longer.push(5);
    let at = text.len();
    assert_eq!(cache.next_position(), Ok(at as i32));
    step(cache, &longer, at, at + 1)
}

/// Returns a text of a family in which many texts share their first tokens.
fn some_text(rng: &mut Rng) -> Vec<i64> {
    let mut text = Vec::new();
    let n = 20 + rng.below(60);
    while text.len() < n {
        // Appends one of two lists of 13 tokens.
        let which = i64::from(rng.chance(0.35));
        text.extend((0..13).map(|i| which * 100 + i));
    }
    text.truncate(n);
    text
}

fn shared(a: &[i64], b: &[i64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

fn labels(tokens: &[i64]) -> Labels<'_> {
    Labels { fingerprint: MODEL, tokens }
}

fn save(store: &PrefixStore, shape: Shape, text: &[i64]) -> bool {
    let mut cache = shape.make();
    read(&mut cache, text);
    store.save(&mut *cache, labels(text)).unwrap()
}

/// Loads the longest stored prefix of a text, and checks that the cache then equals a cache that read the prefix.
/// Returns its length.
fn load(store: &PrefixStore, shape: Shape, text: &[i64]) -> usize {
    let mut cache = shape.make();
    let n = store.load(&mut *cache, MODEL, text).unwrap();
    assert_eq!(cache.next_position(), Ok(n as i32));
    assert!(n == 0 || n >= MIN_TOKENS, "{n} tokens");
    let mut fresh = shape.make();
    read(&mut fresh, &text[..n]);
    assert_eq!(answer(&mut cache, &text[..n]), answer(&mut fresh, &text[..n]), "{n} of {text:?}");
    n
}

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
        let shape = Shape::of(seed);
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
                    let cache = shape.make();
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
    let shape = Shape { kind: 0, windowed: false };
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
    // Other kinds, layers and models do not find it.
    for other in [Shape { kind: 1, ..shape }, Shape { windowed: true, ..shape }] {
        assert_eq!(load(&store, other, &text), 0);
    }
    let mut cache = shape.make();
    assert_eq!(store.load(&mut *cache, "another model", &text), Ok(0));
}

#[test]
fn the_least_recently_used_file_is_removed_first() {
    let folder = TempDir::new().unwrap();
    let shape = Shape { kind: 0, windowed: false };
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
    let shape = Shape { kind: 0, windowed: false };
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

    let mut cache = shape.make();
    read(&mut cache, &text[..40]);
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
        let shape = Shape { kind, windowed: false };
        let mut cache = shape.make();
        read(&mut cache, &text);
        cache.sequences_mut().unwrap().seq_rm(0, 20..30).unwrap();
        refused(&mut cache, "holds 50 positions up to 60");

        let mut cache = shape.make();
        read(&mut cache, &text);
        let all = cache.sequences_mut().unwrap();
        all.seq_cp(0, 3, 0..i32::MAX).unwrap();
        refused(&mut cache, "holds 2 sequences");
        cache.sequences_mut().unwrap().seq_keep(3).unwrap();
        refused(&mut cache, "expected a cache with sequence 0 only, got the sequences [3]");
    }
    let mut cache = Shape { kind: 2, windowed: false }.make();
    read(&mut cache, &text);
    cache.trees_mut().unwrap().propose(0, &[-1, 0]).unwrap();
    refused(&mut cache, "2 candidates");

    let mut cache = Shape { kind: 0, windowed: false }.make();
    read(&mut cache, &text);
    cache.convert("f32".parse().unwrap(), "f32".parse().unwrap()).unwrap();
    assert_eq!(store.save(&mut *cache, labels(&text)), Ok(false));
    let unnamed = Labels { fingerprint: "", tokens: &text };
    for error in [
        store.save(&mut *cache, unnamed).unwrap_err(),
        store.load(&mut *Shape { kind: 0, windowed: false }.make(), "", &text).unwrap_err(),
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
            max_step_tokens: 8,
            k_format: "row-int4".parse().unwrap(),
            v_format: "row-int4".parse().unwrap(),
            float_format: "f32".parse().unwrap(),
            quantized_kv_start,
            ..CacheConfig::uniform(LAYERS, HEADS as i32, DIM as i32, capacity)
        };
        Box::new(ContiguousCache::<CpuStore>::new(config).unwrap())
    };
    let text: Vec<i64> = (0..90).collect();
    let save = |mut cache: AnyCache, text: &[i64]| {
        read(&mut cache, text);
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
            let mut config = CacheConfig {
                max_step_tokens: 8,
                ..CacheConfig::uniform(LAYERS, HEADS as i32, DIM as i32, capacity)
            };
            config.layers[1].policy = policy;
            Box::new(ContiguousCache::<CpuStore>::new(config).unwrap())
        };
        let text: Vec<i64> = (0..90).collect();
        for capacity in [200, 300] {
            let mut cache = make(capacity);
            read(&mut cache, &text);
            assert!(store.save(&mut *cache, labels(&text)).unwrap(), "{policy} of {capacity}");
            let mut other = make(capacity);
            assert_eq!(store.load(&mut *other, MODEL, &text).unwrap(), 90, "{policy}");
            assert_eq!(answer(&mut other, &text), answer(&mut cache, &text));
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

const FOLDER: &str = "ETKV_TEST_STORE";
const SECONDS: &str = "ETKV_TEST_STORE_SECONDS";

/// The body of the processes that other tests start.
#[test]
#[ignore = "other tests run it in separate processes"]
fn a_process_stores_and_loads() {
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let seconds: f64 = std::env::var(SECONDS).unwrap().parse().unwrap();
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let rng = &mut Rng::new(u64::from(std::process::id()));
    // There is room for a dozen files.
    let store = PrefixStore::open(&folder, 400_000).unwrap();
    while Instant::now() < until {
        let (shape, text) = (Shape::of(rng.next_u64() % 6), some_text(rng));
        if rng.chance(0.5) {
            save(&store, shape, &text);
        } else {
            load(&store, shape, &text);
        }
    }
}

fn start(folder: &Path, seconds: f64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_process_stores_and_loads", "--ignored", "--nocapture"])
        .env(FOLDER, folder)
        .env(SECONDS, seconds.to_string())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap()
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
        let right = (0..6).map(Shape::of).any(|shape| {
            let mut cache = shape.make();
            let Ok(text) = etkv_file::load(&mut *cache, &path, MODEL) else { return false };
            let mut fresh = shape.make();
            read(&mut fresh, &text);
            assert_eq!(answer(&mut cache, &text), answer(&mut fresh, &text));
            true
        });
        assert!(right, "{}", path.display());
    }
}
