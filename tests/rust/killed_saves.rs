//! Processes that are killed while they save caches with recurrent layers. Afterwards each file has its complete old
//! or new contents, and a prefix store has every text that was stored.
//!
//! `make kill-saves KILLS=1000` kills that many.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use etkv_core::{CacheConfig, KvFormat, LayerConfig, RecurrentLayer, Step};
use etkv_file::{load, load_sequence, save, save_sequence, PrefixStore};
use etkv_tests::backend::Backend;
use etkv_tests::campaign::saving::{driver, written, Written};
use etkv_tests::on_cpu::OnCpu;
use etkv_tests::recurrence::{self, Token};
use etkv_tests::stores::{self, MODEL};
use etkv_tests::{oracle, runs, Rng};

type AnyCache = driver::AnyCache<OnCpu>;

/// The number of versions of the contents. A process saves the versions one after the other.
const VERSIONS: u64 = 6;

/// The target of a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Target {
    /// A cache of one sequence.
    Contiguous,
    /// A cache with several sequences and candidates.
    Tree,
    /// One sequence of such a cache.
    Sequence,
    /// A text in a store.
    Store,
}

impl Target {
    const ALL: [Self; 4] = [Self::Contiguous, Self::Tree, Self::Sequence, Self::Store];

    fn path(self, folder: &Path) -> PathBuf {
        folder.join(format!("{self:?}"))
    }

    fn empty(self) -> AnyCache {
        let recurrence = RecurrentLayer::Recurrence {
            k_heads: 1,
            heads: 2,
            k_dim: 16,
            v_dim: 16,
            channel_decay: false,
        };
        let config = CacheConfig {
            recurrent_layers: vec![
                RecurrentLayer::Convolution { channels: 8, width: 4 },
                recurrence,
            ],
            ..CacheConfig::uniform(1, 1, 8, 600).stored_as(KvFormat::F32)
        };
        let kind = if matches!(self, Self::Contiguous | Self::Store) { 0 } else { 2 };
        driver::Shape { kind, config }.make::<OnCpu>()
    }

    /// Returns a cache with the contents of a version.
    fn filled(self, version: u64) -> AnyCache {
        let mut cache = self.empty();
        let text = text_of(version);
        if matches!(self, Self::Contiguous | Self::Store) {
            cache.mark(64).unwrap();
            run(&mut cache, &text, &(0..text.len() as i32).collect::<Vec<_>>());
            return cache;
        }
        // Two sequences that share their first tokens, and candidates after the second.
        let (first, second) = text.split_at(text.len() / 2);
        let mut at = 0;
        for (part, sequence) in [(first, 0), (second, 1)] {
            let all = cache.sequences_mut().unwrap();
            all.seq_cp(0, 1, 0..i32::MAX).unwrap();
            all.seq_mark(sequence, 64).unwrap();
            all.begin_step(&vec![sequence; part.len()]).unwrap();
            run(&mut cache, part, &(at..at + part.len() as i32).collect::<Vec<_>>());
            at += part.len() as i32;
        }
        if self == Self::Tree {
            cache.trees_mut().unwrap().propose(1, &[-1, 0, 0]).unwrap();
            run(&mut cache, &[7, 8, 9], &[at, at + 1, at + 1]);
        }
        cache
    }

    fn save(self, cache: &mut AnyCache, version: u64, folder: &Path) {
        let path = self.path(folder);
        let tokens = [version as i64];
        let labels = stores::labels(&tokens);
        match self {
            Self::Contiguous | Self::Tree => save(&mut **cache, &path, labels).unwrap(),
            Self::Sequence => save_sequence(&mut **cache, 1, &path, labels).unwrap(),
            Self::Store => {
                let tokens: Vec<i64> = text_of(version).iter().map(|&one| one as i64).collect();
                // There is room for some of the versions.
                let store = PrefixStore::open(&path, 600_000).unwrap();
                store.save(&mut **cache, stores::labels(&tokens)).unwrap();
            }
        }
    }

    /// Loads the target from a folder; in a store, the text of `version`. Returns the version in the token ids and
    /// the contents, or `None` if the file does not exist yet.
    fn load(self, version: u64, folder: &Path) -> Option<(u64, Written)> {
        let path = self.path(folder);
        let mut cache = self.empty();
        if !path.exists() {
            return None;
        }
        let tokens = match self {
            Self::Contiguous | Self::Tree => load(&mut *cache, &path, MODEL).unwrap(),
            Self::Sequence => load_sequence(&mut *cache, 3, &path, MODEL).unwrap(),
            Self::Store => {
                let tokens: Vec<i64> = text_of(version).iter().map(|&one| one as i64).collect();
                let store = PrefixStore::open(&path, u64::MAX).unwrap();
                let n = store.load(&mut *cache, MODEL, &tokens).unwrap();
                if n < tokens.len() {
                    return None;
                }
                vec![version as i64]
            }
        };
        let [version] = tokens[..] else { panic!("{tokens:?}") };
        Some((version as u64, written(cache.saving().unwrap())))
    }
}

/// Returns the text of a version. All of these texts begin with the same tokens.
fn text_of(version: u64) -> Vec<Token> {
    let rng = &mut Rng::new(version);
    let n = 200 + rng.below(200);
    (0..n as u64).map(|at| if at < 90 { at } else { 1000 * (version + 1) + at }).collect()
}

fn run(cache: &mut AnyCache, tokens: &[Token], positions: &[i32]) {
    let layers: Vec<LayerConfig> = cache.config().layers.clone();
    let recurrent = cache.config().recurrent_layers.clone();
    let mut step = Step::begin(&mut **cache, positions).unwrap();
    for (id, &layer) in recurrent.iter().enumerate() {
        let mut outputs = Vec::new();
        step.update_recurrent(id, &mut |spec| {
            recurrence::planned::<OnCpu>(id, layer, tokens, spec, &mut outputs)
        })
        .unwrap();
    }
    for (id, layer) in layers.iter().enumerate() {
        let row = |&token: &Token| {
            oracle::random_rows(&mut Rng::new(token), 1, 1, layer.k_head_dim as usize).remove(0)
        };
        let rows = OnCpu::tensor(&tokens.iter().map(row).collect::<Vec<_>>());
        step.update_and_fetch(id, &rows, &rows).unwrap();
    }
    step.commit(&[]).unwrap();
}

const FOLDER: &str = "ETKV_TEST_KILLED";
const SEED: &str = "ETKV_TEST_KILLED_SEED";

/// The body of the processes that are killed.
#[test]
#[ignore = "another test runs it in separate processes"]
fn a_process_saves() {
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let seed = std::env::var(SEED).unwrap().parse().unwrap();
    let rng = &mut Rng::new(seed);
    let of = |version| Target::ALL.map(|target| ((target, version), target.filled(version)));
    let mut caches: HashMap<(Target, u64), AnyCache> = (0..VERSIONS).flat_map(of).collect();
    // Each line is a single write, which a kill does not split.
    let mut log = File::options().append(true).create(true).open(folder.join("log")).unwrap();
    for _ in 0..100_000 {
        let (target, version) = (rng.pick(&Target::ALL), rng.below(VERSIONS as usize) as u64);
        let cache = caches.get_mut(&(target, version)).unwrap();
        log.write_all(format!("begun {target:?} {version}\n").as_bytes()).unwrap();
        target.save(cache, version, &folder);
        log.write_all(format!("saved {target:?} {version}\n").as_bytes()).unwrap();
    }
}

fn start(folder: &Path, seed: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_process_saves", "--ignored", "--nocapture"])
        .env(FOLDER, folder)
        .env(SEED, seed.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// The log of the processes. For each target, it has the version that was saved last, and the version that may have
/// been saved since then.
#[derive(Debug, Default)]
struct Noted {
    saved: HashMap<Target, u64>,
    begun: Option<(Target, u64)>,
}

impl Noted {
    fn add(&mut self, log: &str) {
        for line in log.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let [what, target, version] = words[..] else { panic!("{line}") };
            let target = Target::ALL.into_iter().find(|one| format!("{one:?}") == target).unwrap();
            let version = version.parse().unwrap();
            self.begun = (what == "begun").then_some((target, version));
            if what == "saved" {
                self.saved.insert(target, version);
            }
        }
    }
}

#[test]
fn a_process_that_is_killed_leaves_old_or_new_contents() {
    let folder = tempfile::tempdir().unwrap();
    let expected = expected();
    let rng = &mut Rng::new(11);
    let mut noted = Noted::default();
    let [mut in_a_save, mut replaced] = [0, 0];
    for kill in 0..runs(25) {
        let log = folder.path().join("log");
        let _ = std::fs::remove_file(&log);
        let mut child = start(folder.path(), kill);
        let begun = || std::fs::metadata(&log).is_ok_and(|log| log.len() > 0);
        let until = Instant::now() + Duration::from_secs(60);
        while !begun() && Instant::now() < until {
            std::thread::sleep(Duration::from_micros(200));
        }
        std::thread::sleep(Duration::from_micros(rng.below(30_000) as u64));
        child.kill().unwrap();
        child.wait().unwrap();
        noted.add(&std::fs::read_to_string(&log).unwrap());
        in_a_save += u64::from(noted.begun.is_some());
        let unsure = noted.begun.take();
        for target in Target::ALL {
            let Some(&old) = noted.saved.get(&target) else { continue };
            let new = unsure.filter(|(one, _)| *one == target).map(|(_, new)| new);
            let Some((found, contents)) = target.load(old, folder.path()) else {
                panic!("{target:?} is missing, although {old} was saved; {new:?} was begun");
            };
            assert!(found == old || Some(found) == new, "{found}, not {old} or {new:?}");
            assert!(contents == expected[&(target, found)], "{target:?} {found} differs");
            replaced += u64::from(found != old);
            noted.saved.insert(target, found);
        }
        remove_parts(folder.path());
        remove_parts(&Target::Store.path(folder.path()));
    }
    println!("{} kills, {in_a_save} in a save, {replaced} after its file was replaced", runs(25));
    assert_eq!(noted.saved.len(), Target::ALL.len());
    assert!(in_a_save > 0, "no process was killed in a save");
}

/// Returns the contents of each version after it was saved and loaded.
fn expected() -> HashMap<(Target, u64), Written> {
    let mut expected = HashMap::new();
    for target in Target::ALL {
        for version in 0..VERSIONS {
            let folder = tempfile::tempdir().unwrap();
            target.save(&mut target.filled(version), version, folder.path());
            let (found, contents) = target.load(version, folder.path()).unwrap();
            assert_eq!(found, version);
            expected.insert((target, version), contents);
        }
    }
    expected
}

/// Removes the incomplete files that killed processes left.
fn remove_parts(folder: &Path) {
    let Ok(files) = std::fs::read_dir(folder) else { return };
    for path in files.map(|file| file.unwrap().path()) {
        if path.extension().is_some_and(|end| end == "part") {
            std::fs::remove_file(path).unwrap();
        }
    }
}
