//! Sessions that are created, grow, convert and are dropped under one memory budget, and checkpoints that are dropped
//! to make room for a step. The whole process shares the budget, so this file is a separate process, and its tests take
//! turns.

use std::sync::Mutex;

use etkv_core::{
    AttendCache, Cache, CacheConfig, CellsCache, Growth, KvFormat, LayerPolicy, MemoryBudget,
    RecurrentLayer, Result, Status, Step,
};
use etkv_tests::backend::Backend;
use etkv_tests::campaign::saving::driver::{AnyCache, Shape};
use etkv_tests::on_cpu::OnCpu;
use etkv_tests::oracle::{assert_close, attention, random_rows, Rows};
use etkv_tests::recurrence::planned;
use etkv_tests::vec_store::OnVec;
use etkv_tests::{for_seeds, runs, Rng};

const HEADS: usize = 2;
const DIM: usize = 32;
const SCALE: f32 = 0.3;

static TURN: Mutex<()> = Mutex::new(());

struct Session<B: Backend> {
    cache: AnyCache<B>,
    /// The expected rows at each position. Both layers have the same rows.
    keys: Rows,
    values: Rows,
    /// Whether the oracle computes the attention. It can do so for rows of full history that were never rounded.
    is_exact: bool,
}

impl<B: Backend> Session<B> {
    fn make(rng: &mut Rng) -> Result<Self> {
        let mut config = CacheConfig::uniform(2, HEADS as i32, DIM as i32, 200);
        config.growth = rng.pick(&[
            Growth::Doubling { first: 16 },
            Growth::Step { step: 10 },
            Growth::Exact,
            Growth::Upfront,
        ]);
        config.max_step_tokens = 40;
        let has_windows = rng.chance(0.3);
        if has_windows {
            config.layers[1].policy = LayerPolicy::Window { window: 20, sinks: 2 };
        }
        let format = rng.pick(&[KvFormat::F32, KvFormat::F32, KvFormat::Bf16]);
        let config = config.stored_as(format);
        let cache = Shape { kind: rng.below(3), config }.try_make::<B>()?;
        let is_exact = !has_windows && format == KvFormat::F32;
        Ok(Self { cache, keys: Rows::new(), values: Rows::new(), is_exact })
    }

    fn change(&mut self, rng: &mut Rng) -> Result<()> {
        match rng.below(12) {
            0 => {
                let length = rng.below(self.keys.len() + 1);
                if self.cache.rewind(length as i32).is_ok() {
                    self.keys.truncate(length);
                    self.values.truncate(length);
                }
                Ok(())
            }
            1 => {
                self.cache.clear(rng.chance(0.5))?;
                self.keys.clear();
                self.values.clear();
                Ok(())
            }
            2 => {
                let format = rng.pick(&[KvFormat::F16, KvFormat::F32, KvFormat::Mxfp8]);
                self.cache.convert(format, format)?;
                self.is_exact = false;
                Ok(())
            }
            _ => self.append(rng),
        }
    }

    fn append(&mut self, rng: &mut Rng) -> Result<()> {
        let n = 1 + rng.below(40);
        let first = self.keys.len();
        if !self.cache.can_extend(n as i32) {
            return Ok(());
        }
        let [keys, values, queries] = [(); 3].map(|()| random_rows(rng, n, HEADS, DIM));
        let positions: Vec<i32> = (first as i32..).take(n).collect();
        let committed = B::run(|| -> Result<Rows> {
            let [k, v, q] = [&keys, &values, &queries].map(|rows| B::tensor(rows));
            let mut step = Step::begin(&mut *self.cache, &positions)?;
            let mut attended = Rows::new();
            for layer in 0..2 {
                let spec = step.update_and_fetch(layer, &k, &v)?;
                attended = B::rows(&B::attend(&q, &spec, SCALE)?);
            }
            step.commit(&[])?;
            Ok(attended)
        });
        let attended = committed?;
        self.keys.extend(keys);
        self.values.extend(values);
        for (t, (query, found)) in queries.iter().zip(&attended).enumerate() {
            if self.is_exact {
                let seen = first + t + 1;
                let expected = attention(query, &self.keys[..seen], &self.values[..seen], SCALE);
                assert_close(found, &expected, 1e-4);
            }
        }
        Ok(())
    }

    fn allocated(&self) -> u64 {
        self.cache.memory().allocated
    }
}

/// Returns whether the error is a refusal of the budget or a lack of memory. No other error may occur.
fn is_refusal(error: &etkv_core::Error) -> bool {
    assert_eq!(error.status(), Status::Backend, "{error}");
    assert!(error.message().contains("the memory budget is"), "{error}");
    true
}

/// Returns the number of calls that the budget refused, and the number of calls that it did not refuse.
fn sessions_come_and_go<B: Backend>(rng: &mut Rng) -> [usize; 2] {
    let budget = MemoryBudget::global();
    assert_eq!((budget.report().held, budget.report().caches), (0, 0));
    let limit = 20_000 + rng.below(400_000) as u64;
    budget.set_limit(Some(limit));
    let mut sessions: Vec<Session<B>> = Vec::new();
    let mut refused = [0; 2];
    for _ in 0..60 {
        let before = budget.report();
        let found = match rng.below(10) {
            0 | 1 => Session::make(rng).map(|session| sessions.push(session)),
            2 if !sessions.is_empty() => {
                drop(sessions.swap_remove(rng.below(sessions.len())));
                Ok(())
            }
            _ if sessions.is_empty() => Ok(()),
            _ => {
                let at = rng.below(sessions.len());
                let session = &mut sessions[at];
                let (length, bytes) = (session.cache.length(), session.allocated());
                let changed = session.change(rng);
                if changed.is_err() {
                    assert_eq!((session.cache.length(), session.allocated()), (length, bytes));
                }
                changed
            }
        };
        let after = budget.report();
        match &found {
            Ok(()) => refused[1] += 1,
            Err(error) => {
                refused[0] += usize::from(is_refusal(error));
                assert_eq!((after.held, after.caches), (before.held, before.caches));
            }
        }
        let held: u64 = sessions.iter().map(Session::allocated).sum();
        assert_eq!((after.held, after.caches), (held, sessions.len()));
        assert!(after.held <= limit, "{after:?}");
    }
    drop(sessions);
    assert_eq!((budget.report().held, budget.report().caches), (0, 0));
    refused
}

#[test]
fn caches_together_stay_within_the_budget() {
    let _turn = TURN.lock();
    let counts = Mutex::new([0; 2]);
    for_seeds(200, |seed| {
        let mut rng = Rng::new(seed);
        let found = match seed % 2 {
            0 => sessions_come_and_go::<OnVec>(&mut rng),
            _ => sessions_come_and_go::<OnCpu>(&mut rng),
        };
        let mut counts = counts.lock().unwrap();
        (0..2).for_each(|i| counts[i] += found[i]);
    });
    let counts = counts.into_inner().unwrap();
    // A single seed may have no refusals.
    let enough = runs(200) < 20 || counts.iter().all(|&n| n > 100);
    assert!(enough || std::env::var_os("ETKV_SEED").is_some(), "refused, not refused: {counts:?}");
}

const RECURRENT: [RecurrentLayer; 2] = [
    RecurrentLayer::Convolution { channels: 4, width: 17 },
    RecurrentLayer::Recurrence { k_heads: 1, heads: 1, k_dim: 2, v_dim: 2, channel_decay: false },
];

/// Adds `n` tokens to each of these sequences, in one step.
fn extend<B: Backend>(cache: &mut CellsCache<B::Store>, sequences: &[i32], n: usize) -> Result<()> {
    let all = cache.sequences_mut().unwrap();
    let mut positions: Vec<i32> = Vec::new();
    for &sequence in sequences {
        positions.extend((all.seq_next(sequence)?..).take(n));
    }
    all.begin_step(&sequences.iter().flat_map(|&one| vec![one; n]).collect::<Vec<_>>())?;
    if let Err(error) = cache.begin(&positions) {
        cache.sequences_mut().unwrap().cancel_step()?;
        return Err(error);
    }
    let tokens: Vec<u64> = positions.iter().map(|&position| position as u64).collect();
    for (id, layer) in RECURRENT.into_iter().enumerate() {
        cache.update_recurrent(id, &mut |spec| {
            planned::<B>(id, layer, &tokens, spec, &mut Rows::new())
        })?;
    }
    cache.commit()
}

/// Adds `n` tokens to each of two new sequences, with no more memory than another sequence and its two checkpoints have
/// allocated. Returns the checkpoints after the step, or `None` if the step is refused.
fn step_beside_checkpoints<B: Backend>(n: usize) -> Option<Vec<i32>> {
    let budget = MemoryBudget::global();
    let config = CacheConfig {
        layers: Vec::new(),
        recurrent_layers: RECURRENT.to_vec(),
        anchors: 1,
        checkpoints: 2,
        growth: Growth::Exact,
        ..CacheConfig::uniform(0, 1, 1, 900)
    };
    let mut cache = CellsCache::<B::Store>::new(config).unwrap();
    for position in [128, 256] {
        assert_eq!(cache.sequences_mut().unwrap().seq_mark(0, position), Ok(position));
    }
    (0..48).for_each(|_| extend::<B>(&mut cache, &[0], 8).unwrap());
    let checkpoints =
        |cache: &CellsCache<B::Store>| cache.sequences().unwrap().seq_checkpoints(0).unwrap();
    assert_eq!(checkpoints(&cache), [128, 256]);
    budget.set_limit(Some(budget.report().held));
    let begun = extend::<B>(&mut cache, &[1, 2], n);
    budget.set_limit(None);
    let kept = checkpoints(&cache);
    if let Err(error) = &begun {
        assert!(is_refusal(error));
        assert_eq!(kept, [128, 256], "a step of {n} tokens is refused anyway");
        // With memory, the same step runs, and the checkpoints stay.
        extend::<B>(&mut cache, &[1, 2], n).unwrap();
        assert_eq!(checkpoints(&cache), [128, 256]);
    }
    for position in [256, 128] {
        let sequences = cache.sequences().unwrap();
        assert_eq!(sequences.seq_reachable(0, position) == Ok(position), kept.contains(&position));
    }
    begun.is_ok().then_some(kept)
}

fn checkpoints_give_way<B: Backend>() {
    // The other test leaves its limit if it fails.
    MemoryBudget::global().set_limit(None);
    assert_eq!(MemoryBudget::global().report().held, 0);
    B::run(|| {
        let mut found: Vec<Option<Vec<i32>>> =
            (1..=64).step_by(3).map(step_beside_checkpoints::<B>).collect();
        found.dedup();
        let kept = |positions: &[i32]| Some(positions.to_vec());
        // The longer the steps, the more checkpoints are dropped. In the end, dropping all of them is not enough.
        assert_eq!(found, [kept(&[128, 256]), kept(&[256]), kept(&[]), None]);
    });
}

#[test]
fn checkpoints_give_way_only_to_a_step_that_then_fits() {
    let _turn = TURN.lock();
    checkpoints_give_way::<OnVec>();
    checkpoints_give_way::<OnCpu>();
}
