//! The calls of a session, and their results.

use std::path::Path;

use etkv_core::{KvFormat, MemoryBudget, Result, Status, Step};
use etkv_file::{load, save, Labels};
use etkv_tests::backend::Backend;
use etkv_tests::campaign::saving::driver::{one, AnyCache};
use etkv_tests::{oracle, Rng};

/// The result of a call.
#[derive(Clone, PartialEq)]
pub enum Answer {
    /// The bits of the rows that the queries of a step see.
    Done(Vec<u32>),
    /// The budget refused the call.
    Refused,
    Failed(Status),
}

impl Answer {
    pub fn of(result: Result<Vec<u32>>) -> Self {
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

    /// Returns whether both results have the same values, except for rounding.
    pub fn is_close(&self, other: &Self) -> bool {
        let (Self::Done(a), Self::Done(b)) = (self, other) else { return false };
        let close = |(&a, &b): (&u32, &u32)| {
            let [a, b] = [f32::from_bits(a), f32::from_bits(b)];
            (a - b).abs() <= 1e-4 * a.abs().max(1.0)
        };
        a.len() == b.len() && a.iter().zip(b).all(close)
    }
}

impl std::fmt::Debug for Answer {
    /// Prints only the number of bits, because the bits of a step would fill pages.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Done(bits) => write!(f, "{} values, {:?}…", bits.len(), bits.first()),
            Self::Refused => f.write_str("refused by the budget"),
            Self::Failed(status) => write!(f, "{status:?}"),
        }
    }
}

/// The length and the formats of a cache.
pub type State = (i32, [KvFormat; 2]);

pub fn state<B: Backend>(cache: &AnyCache<B>) -> State {
    (cache.length(), cache.formats())
}

/// Returns whether the call of a seed loads a file.
pub fn loads(seed: u64) -> bool {
    matches!(Rng::new(seed).below(30), 3 | 4)
}

/// Runs the call of a seed. `file` belongs to the session.
pub fn call<B: Backend>(seed: u64, cache: &mut AnyCache<B>, file: &Path) -> Result<Vec<u32>> {
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

/// Begins a step, writes the rows of its first layer, and rolls it back or sets it aside.
pub fn interrupted<B: Backend>(rng: &mut Rng, cache: &mut AnyCache<B>, aside: bool) -> Result<()> {
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
    // The declaration of a step that was set aside is dropped with it.
    match cache.sequences_mut() {
        Some(all) if !aside || begun.is_err() => begun.and(all.cancel_step()),
        _ => begun,
    }
}
