//! Random sessions on several threads under one memory budget. Each is compared with the same session without a
//! budget. The whole process shares the budget, so this file is a separate process with a single test.
//!
//! A session without a budget repeats the calls of the other session. A call that the budget refused is refused in
//! the repetition too, so that both sessions have run the same calls. Then the queries of all steps must see the same
//! bits.

mod calls;
mod prefixes;
mod twins;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use etkv_core::budget::Share;
use etkv_core::{MemoryBudget, Reclaim, ReclaimClass};
use etkv_tests::backend::Backend;
use etkv_tests::campaign::saving::driver::{AnyCache, Shape};
use etkv_tests::on_cpu::OnCpu;
use etkv_tests::vec_store::OnVec;
use etkv_tests::{for_seeds, runs, Rng};

use calls::{call, interrupted, state, Answer};
use prefixes::{book, known_after, SharedAction, SharedObjects, Text};
use twins::{compare, Action, Call, Counts, EndedSession};

const CALLS: usize = 60;

/// Prefixes that are not in use, and caches that the host does not need.
struct Spare<T>(Mutex<Vec<T>>);

impl<T: Send> Reclaim for Spare<T> {
    fn reclaim(&self, bytes: u64) -> u64 {
        assert!(bytes > 0 && MemoryBudget::is_reclaiming());
        // Another thread may hold this lock, and may wait for a lock that this thread holds.
        self.0.try_lock().map_or(0, |mut spare| u64::from(spare.pop().is_some()))
    }
}

/// The objects that the threads of one seed share.
struct Shelter<B: Backend> {
    limit: u64,
    folder: tempfile::TempDir,
    idle: Arc<Spare<Share>>,
    host: Arc<Spare<AnyCache<B>>>,
    common: SharedObjects,
}

impl<B: Backend> Shelter<B> {
    fn check(&self) {
        let (held, limit) = (MemoryBudget::global().report().held, self.limit);
        assert!(held as f64 <= limit as f64 * 1.01, "{held} bytes are held, {limit} allowed");
    }

    /// Adds an object that the budget can reclaim, or frees one.
    fn change(&self, rng: &mut Rng, cache: &mut AnyCache<B>) {
        if rng.chance(0.1) {
            let mut prefix = Share::new("prefix");
            if prefix.reserve(rng.below(self.limit as usize / 4) as u64).is_ok() {
                self.idle.0.lock().unwrap().push(prefix);
            }
            self.check();
        }
        if rng.chance(0.05) {
            let mut spare = Shape::new(rng).try_make::<B>();
            if let Ok(cache) = &mut spare {
                let _ = interrupted::<B>(rng, cache, true);
            }
            // The object is dropped outside the lock, because a reclaimer may need the lock.
            if let Ok(cache) = spare {
                self.host.0.lock().unwrap().push(cache);
            }
            self.check();
        }
        if rng.chance(0.1) {
            self.common.change::<B>(rng, cache);
            self.check();
        }
    }
}

/// A session under the budget, and its results.
struct Session<B: Backend> {
    shape: Shape,
    cache: AnyCache<B>,
    file: PathBuf,
    /// The text of the cache, as far as it is known.
    text: Text,
    calls: Vec<Call>,
}

impl<B: Backend> Session<B> {
    /// Runs random calls. Returns `None` if the budget refuses the cache.
    fn run(rng: &mut Rng, shape: Shape, among: &Shelter<B>) -> Option<Self> {
        let made = shape.try_make::<B>();
        let cache = made.map_err(|error| assert!(MemoryBudget::is_refusal(&error), "{error}"));
        let file = among.folder.path().join(format!("{}.safetensors", rng.next_u64()));
        let (text, calls) = (Text::new(), Vec::new());
        let mut session = Self { shape, cache: cache.ok()?, file, text, calls };
        while session.calls.len() < CALLS {
            among.change(rng, &mut session.cache);
            match rng.below(10) {
                0 => session.freeze(rng, among),
                1 if rng.chance(0.7) => session.attach(rng, among),
                _ => session.call(rng.next_u64(), among),
            }
        }
        // A step that is set aside keeps its reservation until it ends.
        session.cache.abort();
        Some(session)
    }

    fn done(&mut self, what: Action, answer: Answer, among: &Shelter<B>) {
        among.check();
        let after = state::<B>(&self.cache);
        let is_attached = matches!(what, Action::SharedAction(SharedAction::Attach { .. }));
        // The state is not read after other calls, because reading it ends a step that was set aside.
        let book = (is_attached || answer == Answer::Refused).then(|| book::<B>(&mut self.cache));
        self.calls.push(Call { order: among.common.tick(), what, answer, after, book });
    }

    fn call(&mut self, seed: u64, among: &Shelter<B>) {
        let before = state::<B>(&self.cache);
        let answer = Answer::of(call::<B>(seed, &mut self.cache, &self.file));
        let after = state::<B>(&self.cache);
        if answer == Answer::Refused {
            assert_eq!(after.0, before.0);
        }
        let text = std::mem::take(&mut self.text);
        self.text = known_after::<B>(text, (seed, &answer), [before, after], &self.cache);
        self.done(Action::Call(seed), answer, among);
    }

    fn freeze(&mut self, rng: &mut Rng, among: &Shelter<B>) {
        self.text = among.common.text_of::<B>(&self.text, &self.cache);
        let before = state::<B>(&self.cache);
        // Other sessions may attach to the prefix as soon as it is frozen.
        let order = among.common.tick();
        let answer = Answer::of(among.common.freeze::<B>(rng, &mut self.cache, &self.text));
        assert_eq!(state::<B>(&self.cache), before);
        self.done(Action::SharedAction(SharedAction::Freeze(self.text.clone())), answer, among);
        self.calls.last_mut().unwrap().order = order;
    }

    /// Drops the contents of the cache, and continues from the frozen text of any session.
    fn attach(&mut self, rng: &mut Rng, among: &Shelter<B>) {
        self.cache.abort();
        // Without `release`, buffers that are allocated upfront become the cache's own again. The budget may refuse
        // that.
        let keeps = rng.chance(0.5);
        let frees =
            !keeps || Answer::of(self.cache.clear(false).map(|()| Vec::new())) == Answer::Refused;
        if frees {
            self.cache.clear(true).unwrap();
        }
        self.text.clear();
        among.check();
        let (text, attached) =
            among.common.attach::<B>(rng, &mut self.cache).unwrap_or_else(|| (Text::new(), Ok(0)));
        let n = *attached.as_ref().unwrap_or(&0);
        assert_eq!(self.cache.length(), n as i32);
        self.text = text[..n].to_vec();
        let answer = Answer::of(attached.map(|_| Vec::new()));
        let text = self.text.clone();
        self.done(Action::SharedAction(SharedAction::Attach { text, n, frees }), answer, among);
    }
}

/// Runs sessions on several threads, and compares them with sessions that have no budget.
fn sessions<B: Backend>(seed: u64) -> Counts {
    let mut rng = Rng::new(seed);
    let budget = MemoryBudget::global();
    assert_eq!((budget.report().held, budget.report().caches), (0, 0));
    let limit = (1 << (15 + rng.below(7))) + rng.below(1 << 15) as u64;
    budget.set_limit(Some(limit));
    let folder = tempfile::tempdir().unwrap();
    let common = SharedObjects::new::<B>(&mut rng, folder.path(), limit);
    let (idle, host) = (Arc::new(Spare(Mutex::default())), Arc::new(Spare(Mutex::default())));
    let among = Shelter::<B> { limit, folder, idle, host, common };
    let all: [(ReclaimClass, Arc<dyn Reclaim>); 2] = [
        (ReclaimClass::Host, among.host.clone()),
        (ReclaimClass::IdlePrefixes, among.idle.clone()),
    ];
    for (class, reclaimer) in &all {
        budget.add_reclaimer(*class, Arc::downgrade(reclaimer));
    }
    drop(all);
    // All sessions have the same model, but any kind of cache.
    let shape = Shape::new(&mut rng);
    let given: Vec<(Shape, u64)> = (0..1 + rng.below(3))
        .map(|_| (Shape { kind: rng.below(3), ..shape.clone() }, rng.next_u64()))
        .collect();
    let mut ran: Vec<Session<B>> = std::thread::scope(|scope| {
        let run = |(shape, seed): (Shape, u64)| {
            let among = &among;
            scope.spawn(move || Session::<B>::run(&mut Rng::new(seed), shape, among))
        };
        let threads: Vec<_> = given.into_iter().map(run).collect();
        threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
    });
    let Shelter { folder, idle, host, common, .. } = among;
    drop((idle, host, common));
    // The rows of prefixes stay allocated as long as a cache reads them, and no longer.
    let own: u64 = ran.iter().map(|session| session.cache.memory().allocated).sum();
    assert!(budget.report().held >= own, "{:?}, {own}", budget.report());
    assert_eq!(budget.report().caches, ran.len());
    let mut ended = Vec::new();
    while !ran.is_empty() {
        let mut session = ran.swap_remove(rng.below(ran.len()));
        if rng.chance(0.5) {
            session.cache.clear(true).unwrap();
            let memory = session.cache.memory();
            assert_eq!(memory.shared, 0);
            if ran.is_empty() {
                assert_eq!(budget.report().held, memory.allocated);
            }
        }
        let Session { shape, file, calls, .. } = session;
        ended.push(EndedSession { shape, file, calls });
    }
    assert_eq!((budget.report().held, budget.report().caches), (0, 0));
    budget.set_limit(None);
    let counts = compare::<B>(&ended);
    drop(folder);
    counts
}

#[test]
fn sessions_under_a_budget_answer_as_without() {
    let counts = Mutex::new(Counts::default());
    for_seeds(100, |seed| {
        let found = match seed % 3 {
            0 => sessions::<OnVec>(seed),
            _ => sessions::<OnCpu>(seed),
        };
        counts.lock().unwrap().add(found);
    });
    let all = counts.into_inner().unwrap();
    println!("{all:?}");
    // A single seed may have no refusals.
    let Counts { sessions, calls, refused, frozen, attached } = all;
    let enough = runs(100) < 20
        || (calls > sessions * CALLS / 4
            && [refused, frozen, attached].iter().all(|&n| n > sessions / 2));
    assert!(enough || std::env::var_os("ETKV_SEED").is_some(), "{all:?}");
}
