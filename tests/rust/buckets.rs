//! Stores of texts in buckets: in memory, in `object_store`'s local file system, and at the address in
//! `ETKV_TEST_BUCKET`, for example that of `make test-buckets`. A loaded cache must equal one that read the text
//! itself.
//!
//! `ETKV_RUNS=N` generates N times as many operations. The file is empty without the feature `buckets`.

#![cfg(feature = "buckets")]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use etkv_core::{CacheConfig, ContiguousCache, Status, Step};
use etkv_cpu::CpuStore;
use etkv_file::{PrefixCache, PrefixCacheOptions, PrefixStore, MIN_TOKENS};
use etkv_tests::backend::Backend;
use etkv_tests::campaign::saving::written;
use etkv_tests::on_cpu::OnCpu;
use etkv_tests::stores::{labels, load, save, start, store_and_load, when_read, MODEL};
use etkv_tests::texts::{read, shared, some_text, TextShape};
use etkv_tests::{oracle, runs, Rng};
use object_store::aws::AmazonS3Builder;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::{ObjectStore, ObjectStoreExt};
use tempfile::TempDir;

const PREFIX: &str = "some/texts";

/// A bucket, and the way in which stores in it are opened.
struct Bucket {
    name: &'static str,
    objects: Arc<dyn ObjectStore>,
    prefix: String,
    /// The address, if the bucket has one.
    address: Option<String>,
    folder: TempDir,
}

impl Bucket {
    fn open(&self, max_bytes: u64) -> PrefixStore {
        match &self.address {
            Some(address) => PrefixStore::open(Path::new(address), max_bytes).unwrap(),
            None => PrefixStore::in_bucket(self.objects.clone(), &self.prefix, max_bytes).unwrap(),
        }
    }

    /// Returns the names of the objects, in order.
    fn names(&self) -> Vec<String> {
        let prefix = self.prefix.as_str().into();
        let listed = wait(self.objects.list_with_delimiter(Some(&prefix))).unwrap();
        let name =
            |object: object_store::ObjectMeta| object.location.filename().unwrap().to_owned();
        let mut names: Vec<String> = listed.objects.into_iter().map(name).collect();
        names.sort();
        names
    }

    fn path(&self, name: &str) -> object_store::path::Path {
        format!("{}/{name}", self.prefix).into()
    }

    fn is_slow(&self) -> bool {
        self.address.is_some()
    }
}

fn wait<T>(work: impl std::future::Future<Output = T>) -> T {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.unwrap().block_on(work)
}

/// Returns one empty bucket of each kind.
fn buckets() -> Vec<Bucket> {
    let folder = || TempDir::new().unwrap();
    let local = folder();
    let files: Arc<dyn ObjectStore> =
        Arc::new(LocalFileSystem::new_with_prefix(local.path()).unwrap());
    let prefix = || PREFIX.to_owned();
    let memory: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let mut all = vec![
        Bucket {
            name: "memory",
            objects: memory,
            prefix: prefix(),
            address: None,
            folder: folder(),
        },
        Bucket { name: "files", objects: files, prefix: prefix(), address: None, folder: local },
    ];
    if let Ok(address) = std::env::var("ETKV_TEST_BUCKET") {
        static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let prefix = format!("{}-{number}/texts", std::process::id());
        // This chooses the TLS provider.
        PrefixStore::open(Path::new(&address), 1).unwrap();
        let objects = AmazonS3Builder::from_env().with_url(&address).build().unwrap();
        all.push(Bucket {
            name: "s3",
            objects: Arc::new(objects),
            address: Some(format!("{address}/{prefix}")),
            prefix,
            folder: folder(),
        });
    }
    all
}

#[test]
fn the_longest_beginning_is_loaded() {
    for bucket in buckets() {
        let n_seeds = if bucket.is_slow() { 3 } else { runs(18) };
        for seed in 0..n_seeds {
            let (shape, rng) = (TextShape::of(seed), &mut Rng::new(seed));
            let bucket = match bucket.is_slow() {
                true => buckets().into_iter().find(|other| other.name == bucket.name).unwrap(),
                false => Bucket {
                    prefix: format!("{}/{seed}", bucket.prefix),
                    objects: bucket.objects.clone(),
                    address: None,
                    folder: TempDir::new().unwrap(),
                    ..bucket
                },
            };
            let mut stores = [bucket.open(u64::MAX), bucket.open(u64::MAX)];
            let mut saved: Vec<Vec<i64>> = Vec::new();
            for _ in 0..24 {
                let (text, which) = (some_text(rng), rng.below(2));
                match rng.below(5) {
                    0 => stores[which] = bucket.open(u64::MAX),
                    1 | 2 => {
                        let written = save(&stores[which], shape, &text);
                        assert!(!written || text.len() >= MIN_TOKENS);
                        if text.len() >= MIN_TOKENS {
                            saved.push(text);
                        }
                    }
                    _ => {
                        let found = load(&stores[which], shape, &text);
                        let longest = saved.iter().map(|old| shared(old, &text)).max().unwrap_or(0);
                        let whole = saved.iter().filter(|old| text.starts_with(old)).map(Vec::len);
                        // With windows and conversions, a stored text can be loaded only for texts that differ near
                        // the end.
                        let least = match shape.windowed || shape.format == 2 {
                            true => whole.max().unwrap_or(0),
                            false => longest,
                        };
                        let served = |n| if n < MIN_TOKENS { 0 } else { n };
                        assert!((served(least)..=served(longest)).contains(&found), "{found}");
                    }
                }
            }
            assert!(!saved.is_empty());
            let (n, bytes) = stores[0].usage().unwrap();
            assert!(n > 0 && n <= saved.len() && bytes > 0, "{n} files in {}", bucket.name);
        }
    }
}

/// The object is uploaded in parts, and read with prefetching.
#[test]
fn a_large_object_is_whole() {
    let config = CacheConfig::uniform(3, 8, 128, 1200).stored_as("f32".parse().unwrap());
    let make = || ContiguousCache::<CpuStore>::new(config.clone()).unwrap();
    let text: Vec<i64> = (0..1100).collect();
    let mut cache = make();
    for start in (0..1100).step_by(100) {
        let positions: Vec<i32> = (start..start + 100).collect();
        let mut step = Step::begin(&mut cache, &positions).unwrap();
        let mut rng = Rng::new(start as u64);
        for layer in 0..3 {
            let [k, v] = [0, 1].map(|_| OnCpu::tensor(&oracle::random_rows(&mut rng, 100, 8, 128)));
            step.update_and_fetch(layer, &k, &v).unwrap();
        }
        step.commit(&[]).unwrap();
    }
    let rows = |cache: &mut ContiguousCache<CpuStore>| written(cache).1;
    let expected = rows(&mut cache);
    assert!(expected.len() > 24 << 20);
    for bucket in buckets() {
        let store = bucket.open(u64::MAX);
        assert!(store.save(&mut cache, labels(&text)).unwrap());
        let mut loaded = make();
        assert_eq!(bucket.open(u64::MAX).load(&mut loaded, MODEL, &text), Ok(1100));
        assert!(rows(&mut loaded) == expected, "other rows in {}", bucket.name);
        assert_eq!(bucket.names().len(), 1, "{}", bucket.name);
    }
}

#[test]
fn the_oldest_make_room() {
    let shape = TextShape::PLAIN;
    let text = |first: i64| -> Vec<i64> { (first..first + 40).collect() };
    for bucket in buckets() {
        // S3 stores times in seconds.
        let pause =
            || std::thread::sleep(Duration::from_millis(if bucket.is_slow() { 1100 } else { 15 }));
        assert!(save(&bucket.open(u64::MAX), shape, &text(0)));
        let one = bucket.open(u64::MAX).usage().unwrap().1;
        let store = bucket.open(3 * one);
        for first in [100, 200, 300] {
            pause();
            assert!(save(&store, shape, &text(first)));
        }
        assert_eq!(store.usage(), Ok((3, 3 * one)), "{}", bucket.name);
        for (first, n) in [(0, 0), (100, 40), (200, 40), (300, 40)] {
            assert_eq!(load(&store, shape, &text(first)), n, "{first} in {}", bucket.name);
        }
        assert!(!save(&bucket.open(one / 2), shape, &text(400)));
    }
}

#[test]
fn damaged_and_foreign_files_are_skipped() {
    let shape = TextShape::PLAIN;
    let text: Vec<i64> = (0..90).collect();
    let mut other = text[..50].to_vec();
    other.push(7);
    for bucket in buckets() {
        let store = bucket.open(u64::MAX);
        assert!(save(&store, shape, &other));
        let [short] = &bucket.names()[..] else { panic!() };
        assert!(save(&store, shape, &text));
        let long = bucket.names().into_iter().find(|name| name != short).unwrap();
        for name in [format!("prefix-{:032x}.safetensors", 7), "other.txt".to_owned()] {
            wait(bucket.objects.put(&bucket.path(&name), b"no cache".to_vec().into())).unwrap();
        }
        // Damages the rows, which only a load reads.
        let got = wait(async { bucket.objects.get(&bucket.path(&long)).await?.bytes().await });
        let mut bytes = got.unwrap().to_vec();
        let at = bytes.len() - 1000;
        bytes[at] ^= 1;
        wait(bucket.objects.put(&bucket.path(&long), bytes.into())).unwrap();
        assert_eq!(load(&store, shape, &text), 50, "{}", bucket.name);
        assert_eq!(load(&bucket.open(u64::MAX), shape, &text), 50);
        // The text is stored again under its name.
        assert!(save(&store, shape, &text));
        assert_eq!(load(&store, shape, &text), 90);
        wait(bucket.objects.delete(&bucket.path(&long))).unwrap();
        assert_eq!(load(&store, shape, &text), 50);
        assert!(bucket.names().contains(&"other.txt".to_owned()));
        let mut cache = shape.make::<OnCpu>();
        assert_eq!(store.load(&mut *cache, "another model", &text), Ok(0));
    }
}

#[test]
fn texts_that_were_read_ahead_are_in_memory() {
    let shape = TextShape::PLAIN;
    let text: Vec<i64> = (0..90).collect();
    for bucket in buckets() {
        assert!(save(&bucket.open(u64::MAX), shape, &text));
        let store = Some(Arc::new(bucket.open(u64::MAX)));
        let prefixes = PrefixCache::new(PrefixCacheOptions { store, ..Default::default() });
        let mut cache = shape.make::<OnCpu>();
        assert!(prefixes.prefetch(&mut *cache, MODEL, &text[..80]).unwrap());
        when_read(&prefixes);
        assert_eq!(prefixes.attach(&mut *cache, MODEL, &text[..80]), Ok(80));
        let report = prefixes.report();
        assert_eq!((report.tokens_in_memory, report.tokens_in_store), (80, 0));
        shape.check_read::<OnCpu>(&mut cache, &text[..80]);
    }
}

/// A bucket that fails returns an error, and does so immediately if the failure is recent. A prefix cache skips it.
#[test]
fn a_bucket_that_fails_is_passed_by() {
    let shape = TextShape::PLAIN;
    let text: Vec<i64> = (0..60).collect();
    let bucket = buckets().into_iter().find(|bucket| bucket.name == "files").unwrap();
    let store = Arc::new(bucket.open(u64::MAX));
    assert!(save(&store, shape, &text));
    // Replaces a folder by a file.
    let folder = bucket.folder.path().join("some");
    std::fs::rename(&folder, bucket.folder.path().join("gone")).unwrap();
    std::fs::write(&folder, b"a file").unwrap();
    let cache = shape.make::<OnCpu>();
    let error = store.n_stored(&*cache, MODEL, &text).unwrap_err();
    assert_eq!(error.status(), Status::File);
    assert!(error.message().starts_with("cannot list "), "{error}");
    let error = store.n_stored(&*cache, MODEL, &text).unwrap_err();
    assert!(error.message().contains("not accessed: it failed "), "{error}");
    let options = PrefixCacheOptions { store: Some(store), ..PrefixCacheOptions::default() };
    let prefixes = PrefixCache::new(options);
    let mut cache = shape.make::<OnCpu>();
    assert_eq!(prefixes.attach(&mut *cache, MODEL, &text), Ok(0));
    read::<OnCpu>(&mut cache, &text);
    assert_eq!(prefixes.keep(&mut *cache, MODEL, &text), Ok(true));
}

#[test]
fn addresses_that_are_no_buckets_are_refused() {
    for (address, words) in [
        ("file:///tmp/texts", "expected a bucket"),
        ("memory:///", "expected a bucket"),
        ("nothing://texts", "cannot open nothing://texts"),
        ("s3://", "cannot open s3://"),
    ] {
        let error = PrefixStore::open(Path::new(address), 1).unwrap_err();
        assert_eq!(error.status(), Status::File, "{address}");
        assert!(error.message().contains(words), "{error}");
    }
}

/// The body of the processes that other tests start.
#[test]
#[ignore = "other tests run it in separate processes"]
fn a_process_stores_and_loads() {
    store_and_load(open_store);
}

fn open_store(address: &str, max_bytes: u64) -> PrefixStore {
    match address.contains("://") {
        true => PrefixStore::open(Path::new(address), max_bytes).unwrap(),
        false => {
            let files = LocalFileSystem::new_with_prefix(address).unwrap();
            PrefixStore::in_bucket(Arc::new(files), PREFIX, max_bytes).unwrap()
        }
    }
}

/// Returns buckets that other processes can open.
fn shared_buckets() -> Vec<(Bucket, String)> {
    let all = buckets().into_iter().filter(|bucket| bucket.name != "memory");
    all.map(|bucket| {
        let local = || bucket.folder.path().to_str().unwrap().to_owned();
        let address = bucket.address.clone().unwrap_or_else(local);
        (bucket, address)
    })
    .collect()
}

#[test]
fn processes_share_a_bucket() {
    for (bucket, address) in shared_buckets() {
        let seconds = if bucket.is_slow() { 8.0 } else { 3.0 * runs(1) as f64 };
        let processes = [(); 2].map(|()| start(&address, seconds));
        for mut process in processes {
            assert!(process.wait().unwrap().success(), "{}", bucket.name);
        }
        let (n, bytes) = open_store(&address, u64::MAX).usage().unwrap();
        assert!(n > 0 && bytes <= 400_000 + 100_000, "{n} files of {bytes} bytes");
    }
}

/// A process that is killed while it stores a text leaves only complete objects.
#[test]
fn a_killed_process_leaves_whole_objects() {
    for (bucket, address) in shared_buckets() {
        let n_kills = if bucket.is_slow() { 10 } else { 20 * runs(1) };
        let rng = &mut Rng::new(3);
        for _ in 0..n_kills {
            let mut process = start(&address, 30.0);
            std::thread::sleep(Duration::from_millis(60 + rng.below(300) as u64));
            process.kill().unwrap();
            process.wait().unwrap();
        }
        let store = open_store(&address, u64::MAX);
        let mut found = 0;
        for seed in 0..60 {
            let (shape, text) = (TextShape::of(seed % 6), some_text(&mut Rng::new(seed)));
            found += usize::from(load(&store, shape, &text) > 0);
        }
        assert!(found > 0, "nothing was stored in {}", bucket.name);
        // Every object that has the name of a file can be read.
        for name in bucket.names().iter().filter(|name| name.ends_with(".safetensors")) {
            let path = bucket.path(name);
            let bytes = wait(async { bucket.objects.get(&path).await?.bytes().await }).unwrap();
            let file = bucket.folder.path().join("one");
            std::fs::write(&file, &bytes).unwrap();
            let tensors = safetensors::SafeTensors::deserialize(&bytes);
            assert!(tensors.is_ok_and(|all| all.tensor("checksums").is_ok()), "{name}");
        }
    }
}

/// If no server answers, `open` returns an error.
#[test]
fn no_answer_is_an_error() {
    const ALONE: &str = "ETKV_TEST_NO_ANSWER";
    if std::env::var_os(ALONE).is_none() {
        let done = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "no_answer_is_an_error", "--nocapture"])
            .envs([
                (ALONE, "1"),
                ("AWS_ENDPOINT", "http://127.0.0.1:9"),
                ("AWS_ALLOW_HTTP", "true"),
            ])
            .envs([("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")])
            .output()
            .unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        // A process that runs no test also succeeds, so tests are counted.
        let counted = String::from_utf8_lossy(&done.stdout);
        assert!(counted.contains("ok. 1 passed"), "{counted}");
        return;
    }
    let error = PrefixStore::open(Path::new("s3://bucket/texts"), 1).unwrap_err();
    assert_eq!(error.status(), Status::File);
    assert!(error.message().contains("cannot list AmazonS3(bucket)/texts: "), "{error}");
}
