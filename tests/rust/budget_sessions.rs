//! Random sessions on several threads under one memory budget, each compared with the same session without
//! one. The budget is the process's, so this file is a process of its own, with one test.
//!
//! A session without a budget repeats the calls of the other one. Where the budget refused a call, the repeated
//! call is refused as well, so that both have done the same before and after it. All that the queries of steps
//! see then has to be equal, bit for bit.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use etkv_core::budget::Share;
use etkv_core::{KvFormat, MemoryBudget, Reclaim, ReclaimClass, Result, Status, Step};
use etkv_file::{load, save, Labels};
use etkv_tests::backend::Backend;
use etkv_tests::campaign::saving::driver::{one, AnyCache, Shape};
use etkv_tests::on_cpu::OnCpu;
use etkv_tests::vec_store::OnVec;
use etkv_tests::{for_seeds, oracle, runs, Rng};

const CALLS: usize = 60;

/// What a call answered.
#[derive(Debug, Clone, PartialEq)]
enum Answer {
    /// The bits of what the queries of a step see.
    Done(Vec<u32>),
    /// The budget refused it.
    Refused,
    Failed(Status),
}

impl Answer {
    fn of(result: Result<Vec<u32>>) -> Self {
        match result {
            Ok(bits) => Self::Done(bits),
            Err(error) if MemoryBudget::is_refusal(&error) => {
                assert_eq!(error.status(), Status::Backend, "{error}");
                assert!(error.message().contains("the memory budget is "), "{error}");
                Self::Refused
            }
            Err(error) => {
                assert!(!matches!(error.status(), Status::Backend | Status::Internal), "{error}");
                Self::Failed(error.status())
            }
        }
    }
}

/// A call of a session: its seed, its answer, and the cache after it.
type Call = (u64, Answer, (i32, [KvFormat; 2]));

/// Returns the length and the formats.
fn state<B: Backend>(cache: &AnyCache<B>) -> (i32, [KvFormat; 2]) {
    (cache.length(), cache.formats())
}

/// Makes a call that a seed gives. `file` is the session's own.
fn call<B: Backend>(seed: u64, cache: &mut AnyCache<B>, file: &Path) -> Result<Vec<u32>> {
    let mut rng = Rng::new(seed);
    let done = |result: Result<()>| result.map(|()| Vec::new());
    match rng.below(30) {
        0 => done(cache.clear(rng.chance(0.5))),
        1 | 2 if B::SAVES => {
            done(save(&mut **cache, file, Labels { fingerprint: "m", tokens: &[] }))
        }
        3 | 4 if B::SAVES && file.exists() => load(&mut **cache, file, "m").map(|_| Vec::new()),
        5 => done(interrupted::<B>(&mut rng, cache, false)),
        6 => done(interrupted::<B>(&mut rng, cache, true)),
        _ => one::<B>(&mut rng, cache),
    }
}

/// Begins a step with the rows of its first layer, and rolls it back or sets it aside.
fn interrupted<B: Backend>(rng: &mut Rng, cache: &mut AnyCache<B>, aside: bool) -> Result<()> {
    let n = 1 + rng.below(8) as i32;
    let mut first = cache.length();
    if let Some(all) = cache.sequences_mut() {
        first = all.seq_next(0)?;
        all.begin_step(&vec![0; n as usize])?;
    }
    let layer = cache.config().layers[0];
    let rows = |rng: &mut Rng, dim: i32| {
        B::tensor(&oracle::random_rows(rng, n as usize, layer.n_kv_heads as usize, dim as usize))
    };
    let [k, v] = [layer.k_head_dim, layer.v_head_dim].map(|dim| rows(rng, dim));
    let positions: Vec<i32> = (first..first + n).collect();
    let begun = Step::begin(&mut **cache, &positions).and_then(|mut step| {
        step.update_and_fetch(0, &k, &v)?;
        if aside {
            assert!(step.set_aside().is_ok());
        }
        Ok(())
    });
    // The declaration of a step that was set aside goes with it.
    match cache.sequences_mut() {
        Some(all) if !aside || begun.is_err() => begun.and(all.cancel_step()),
        _ => begun,
    }
}

/// Prefixes that nothing uses, and caches that the host can spare.
struct Spare<T>(Mutex<Vec<T>>);

impl<T: Send> Reclaim for Spare<T> {
    fn reclaim(&self, bytes: u64) -> u64 {
        assert!(bytes > 0 && MemoryBudget::is_reclaiming());
        // Another thread may be here, and it may wait for what this one has locked.
        self.0.try_lock().map_or(0, |mut spare| u64::from(spare.pop().is_some()))
    }
}

type Spares<B> = (Arc<Spare<Share>>, Arc<Spare<AnyCache<B>>>);

/// A session under the budget, and what it answered.
struct Session<B: Backend> {
    shape: Shape,
    cache: AnyCache<B>,
    file: PathBuf,
    calls: Vec<Call>,
}

impl<B: Backend> Session<B> {
    /// Makes random calls. Returns nothing if the budget refuses the cache.
    fn run(rng: &mut Rng, folder: &Path, limit: u64, (prefixes, host): &Spares<B>) -> Option<Self> {
        let shape = Shape::new(rng);
        let within = || {
            let held = MemoryBudget::global().report().held;
            assert!(held as f64 <= limit as f64 * 1.01, "{held} bytes are held, {limit} allowed");
        };
        let Ok(mut cache) = shape.try_make::<B>().map_err(|error| {
            assert!(MemoryBudget::is_refusal(&error), "{error}");
        }) else {
            return None;
        };
        let file = folder.join(format!("{}.safetensors", rng.next_u64()));
        let mut calls = Vec::new();
        for _ in 0..CALLS {
            if rng.chance(0.1) {
                let mut prefix = Share::new("prefix");
                if prefix.reserve(rng.below(limit as usize / 4) as u64).is_ok() {
                    prefixes.0.lock().unwrap().push(prefix);
                }
                within();
            }
            if rng.chance(0.05) {
                let mut spare = Shape::new(rng).try_make::<B>();
                if let Ok(cache) = &mut spare {
                    let _ = interrupted::<B>(rng, cache, true);
                }
                // Outside the lock: a reclaimer may ask for it.
                if let Ok(cache) = spare {
                    host.0.lock().unwrap().push(cache);
                }
                within();
            }
            let (seed, length) = (rng.next_u64(), cache.length());
            let answer = Answer::of(call::<B>(seed, &mut cache, &file));
            within();
            if answer == Answer::Refused {
                assert_eq!(cache.length(), length);
            }
            let after = state::<B>(&cache);
            calls.push((seed, answer, after));
        }
        // A step that was set aside has what it reserved until it ends.
        cache.abort();
        Some(Self { shape, cache, file, calls })
    }

    /// Repeats the calls without a budget, and compares the answers. Returns how many are compared, and how many
    /// of these are refused.
    fn compare(&self) -> [usize; 2] {
        let budget = MemoryBudget::global();
        budget.set_limit(None);
        let _ = std::fs::remove_file(&self.file);
        let mut cache = self.shape.make::<B>();
        let mut compared = [0; 2];
        for (seed, answer, after) in &self.calls {
            let is_refused = *answer == Answer::Refused;
            budget.set_limit(is_refused.then_some(1));
            let found = Answer::of(call::<B>(*seed, &mut cache, &self.file));
            budget.set_limit(None);
            // A conversion of `quantized_kv_start` that waits for memory is no refusal: rows are stored in
            // float for longer than without a budget.
            if state::<B>(&cache).1 != after.1 {
                assert!(self.shape.config.quantized_kv_start.is_some());
                break;
            }
            assert_eq!((&found, state::<B>(&cache)), (answer, *after));
            compared[0] += 1;
            compared[1] += usize::from(is_refused);
        }
        compared
    }
}

/// Runs sessions on several threads. Returns how many there were, and what [`Session::compare`] does.
fn sessions<B: Backend>(seed: u64) -> [usize; 3] {
    let mut rng = Rng::new(seed);
    let budget = MemoryBudget::global();
    assert_eq!((budget.report().held, budget.report().caches), (0, 0));
    let limit = (1 << (15 + rng.below(7))) + rng.below(1 << 15) as u64;
    budget.set_limit(Some(limit));
    let spares: Spares<B> = (Arc::new(Spare(Mutex::default())), Arc::new(Spare(Mutex::default())));
    let all: [(ReclaimClass, Arc<dyn Reclaim>); 2] =
        [(ReclaimClass::Host, spares.1.clone()), (ReclaimClass::IdlePrefixes, spares.0.clone())];
    for (class, reclaimer) in &all {
        budget.add_reclaimer(*class, Arc::downgrade(reclaimer));
    }
    let folder = tempfile::tempdir().unwrap();
    let seeds: Vec<u64> = (0..1 + rng.below(3)).map(|_| rng.next_u64()).collect();
    let ran: Vec<Session<B>> = std::thread::scope(|scope| {
        let run = |&seed: &u64| {
            let (spares, folder) = (&spares, folder.path());
            scope.spawn(move || Session::<B>::run(&mut Rng::new(seed), folder, limit, spares))
        };
        let threads: Vec<_> = seeds.iter().map(run).collect();
        threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
    });
    drop(all);
    drop(spares);
    let held: u64 = ran.iter().map(|session| session.cache.memory().allocated).sum();
    assert_eq!((budget.report().held, budget.report().caches), (held, ran.len()));
    let mut counts = [ran.len(), 0, 0];
    for session in &ran {
        let [compared, refused] = session.compare();
        counts[1] += compared;
        counts[2] += refused;
    }
    counts
}

#[test]
fn sessions_under_a_budget_answer_as_without() {
    let counts = Mutex::new([0; 3]);
    for_seeds(100, |seed| {
        let found = match seed % 3 {
            0 => sessions::<OnVec>(seed),
            _ => sessions::<OnCpu>(seed),
        };
        let mut counts = counts.lock().unwrap();
        (0..3).for_each(|i| counts[i] += found[i]);
    });
    let [sessions, compared, refused] = counts.into_inner().unwrap();
    println!("{sessions} sessions, {compared} calls compared, {refused} of them refused");
    // A single seed may see no refusal.
    let enough = runs(100) < 20 || (compared > sessions * CALLS / 4 && refused > sessions / 2);
    assert!(
        enough || std::env::var_os("ETKV_SEED").is_some(),
        "{sessions} sessions, {compared} compared, {refused} refused"
    );
}
