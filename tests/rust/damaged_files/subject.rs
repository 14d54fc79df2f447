//! Caches with recurrent layers whose files are damaged, and operations on a cache that has loaded such a file.

use etkv_core::bookkeeping::BLOCK;
use etkv_core::snapshot::{Book, CellsState};
use etkv_core::{
    CacheConfig, Growth, KvFormat, LayerConfig, LayerPolicy, RecurrentLayer, Result, Status,
};
use etkv_tests::campaign::saving::driver::{self, Shape};
use etkv_tests::on_cpu::OnCpu;
use etkv_tests::Rng;

pub type AnyCache = driver::AnyCache<OnCpu>;

/// The config of the caches of a seed.
pub struct Subject {
    shape: Shape,
    /// Whether each cache has one text.
    is_text: bool,
}

impl Subject {
    /// Returns caches of several sequences if `shared`, and of one text in sequence 0 if `is_text`.
    pub fn new(rng: &mut Rng, shared: bool, is_text: bool) -> Self {
        let layer = |rng: &mut Rng| LayerConfig {
            n_kv_heads: rng.pick(&[1, 2]),
            k_head_dim: 8,
            v_head_dim: rng.pick(&[4, 8]),
            values_in_keys: rng.chance(0.4),
            policy: match rng.below(4) {
                0 => LayerPolicy::Chunk { chunk: rng.pick(&[4, 30]) },
                1 => LayerPolicy::Window { window: rng.pick(&[4, 30]), sinks: rng.pick(&[0, 3]) },
                _ => LayerPolicy::Full,
            },
        };
        let recurrent = |rng: &mut Rng| match rng.below(3) {
            0 => RecurrentLayer::Convolution { channels: 3, width: rng.pick(&[1, 2, 4, 9]) },
            _ => RecurrentLayer::Recurrence {
                k_heads: 1,
                heads: rng.pick(&[1, 2]),
                k_dim: 2,
                v_dim: 3,
                channel_decay: rng.chance(0.3),
            },
        };
        let recurrent_layers = if rng.chance(0.92) {
            (0..1 + rng.below(2)).map(|_| recurrent(rng)).collect()
        } else {
            vec![]
        };
        let config = CacheConfig {
            layers: (0..1 + rng.below(2)).map(|_| layer(rng)).collect(),
            recurrent_layers,
            capacity: rng.pick(&[150, 300, 700]),
            max_step_tokens: rng.pick(&[20, 90, 150]),
            growth: rng.pick(&[Growth::Doubling { first: 8 }, Growth::Exact, Growth::Upfront]),
            quantized_kv_start: rng.chance(0.15).then_some(50),
            float_format: KvFormat::F16,
            anchors: rng.pick(&[1, 2, 3]),
            checkpoints: rng.pick(&[0, 2, 32, 256]),
            ..CacheConfig::uniform(0, 1, 1, 1).stored_as(KvFormat::F32)
        };
        let kind = if shared && !is_text { 1 + rng.below(2) } else { rng.below(3) };
        Self { shape: Shape { kind, config }, is_text }
    }

    pub fn empty(&self) -> AnyCache {
        self.shape.make::<OnCpu>()
    }

    /// Returns a cache with contents: texts of some blocks, with forks, checkpoints and trees.
    pub fn filled(&self, rng: &mut Rng) -> AnyCache {
        let mut cache = self.empty();
        let config = &self.shape.config;
        let most = config.step_limit().min(config.max_step_tokens) as usize;
        let n_texts =
            if cache.sequences().is_none() || self.is_text { 1 } else { 1 + rng.below(3) };
        let each = (config.capacity as usize * 2 / 3).min(400) / n_texts;
        for text in 0..n_texts as i32 {
            let mut left = 40 + rng.below(each.saturating_sub(30));
            if rng.chance(0.7) {
                let at = rng.below(left) as i32;
                ignore(match cache.sequences_mut() {
                    Some(all) => all.seq_mark(text, at),
                    None => cache.mark(at),
                });
            }
            while left > 0 {
                let n = (1 + rng.below(most)).min(left);
                left -= n;
                append(rng, &mut cache, text, n).unwrap();
            }
        }
        if self.is_text {
            return cache;
        }
        for _ in 0..rng.below(8) {
            ignore(driver::one::<OnCpu>(rng, &mut cache));
        }
        for sequence in live(&cache) {
            if rng.chance(0.4) {
                ignore(grow_tree(rng, &mut cache, sequence));
            }
        }
        if cache.length() == 0 || without_trees(&cache).is_empty() {
            cache.clear(false).unwrap();
            append(rng, &mut cache, 0, 1).unwrap();
        }
        cache
    }
}

/// Fails if an error reports a state that the cache cannot have.
fn ignore<T>(result: Result<T>) {
    if let Err(error) = result {
        assert!(!matches!(error.status(), Status::Internal | Status::Backend), "{error}");
    }
}

fn live(cache: &AnyCache) -> Vec<i32> {
    cache.sequences().map_or_else(|| vec![0], |all| all.live_sequences())
}

/// Returns the sequences that have positions and no candidates.
pub fn without_trees(cache: &AnyCache) -> Vec<i32> {
    let carries = |one| cache.trees().is_some_and(|trees| trees.tree_len(one).unwrap() > 0);
    let holds = |one| cache.sequences().is_none_or(|all| all.seq_len(one).unwrap() > 0);
    live(cache).into_iter().filter(|&one| !carries(one) && holds(one)).collect()
}

/// Runs `n` tokens at the end of a sequence.
fn append(rng: &mut Rng, cache: &mut AnyCache, sequence: i32, n: usize) -> Result<()> {
    let next = match cache.sequences_mut() {
        Some(all) => {
            all.begin_step(&vec![sequence; n])?;
            all.seq_next(sequence)?
        }
        None => cache.next_position()?,
    };
    let positions: Vec<i32> = (next..).take(n).collect();
    let ran = driver::forward::<OnCpu>(rng, cache, &positions).map(drop);
    if let Some(all) = cache.sequences_mut().filter(|_| ran.is_err()) {
        all.cancel_step()?;
    }
    ran
}

/// Proposes candidates after a sequence, and runs them.
fn grow_tree(rng: &mut Rng, cache: &mut AnyCache, sequence: i32) -> Result<()> {
    let Some(trees) = cache.trees_mut() else { return Ok(()) };
    let n = trees.tree_len(sequence)?;
    let chain = rng.chance(0.5);
    let parents: Vec<i32> = (0..1 + rng.below(if chain { 80 } else { 5 }))
        .map(|new| {
            let node = (n + new) as i32;
            if chain {
                node - 1
            } else {
                rng.below(node as usize + 1) as i32 - 1
            }
        })
        .collect();
    let proposed = trees.propose(sequence, &parents);
    if rng.chance(0.2) {
        return proposed;
    }
    // If these candidates did not fit, earlier candidates may still be pending.
    ignore(proposed);
    run_tree(rng, cache, sequence)?;
    if let Some(trees) = cache.trees_mut().filter(|_| rng.chance(0.3)) {
        trees.commit_tree(sequence, if rng.chance(0.8) { &[0] } else { &[] })?;
    }
    Ok(())
}

/// Runs the pending candidates of a sequence.
fn run_tree(rng: &mut Rng, cache: &mut AnyCache, sequence: i32) -> Result<()> {
    let book = cache.saving().unwrap().snapshot()?.book;
    let Book::Cells(CellsState { trees, .. }) = book else { return Ok(()) };
    let Some(tree) = trees.into_iter().find(|tree| tree.sequence == sequence) else {
        return Ok(());
    };
    let all = cache.sequences_mut().unwrap();
    let next = all.seq_next(sequence)?;
    let mut depths: Vec<i32> = Vec::new();
    for &parent in &tree.parents {
        depths.push(usize::try_from(parent).map_or(0, |parent| depths[parent] + 1));
    }
    let waiting = &depths[tree.n_written..];
    all.begin_step(&vec![sequence; waiting.len()])?;
    let positions: Vec<i32> = waiting.iter().map(|depth| next + depth).collect();
    let ran = driver::forward::<OnCpu>(rng, cache, &positions).map(drop);
    if let Some(all) = cache.sequences_mut().filter(|_| ran.is_err()) {
        all.cancel_step()?;
    }
    ran
}

/// Makes every kind of call on a cache. If the cache has loaded a damaged file, its results may be wrong. But no call
/// may panic or poison the cache, and a call that the cache reports as possible must succeed.
pub fn exercise(rng: &mut Rng, cache: &mut AnyCache) {
    let _ = (cache.memory(), cache.report());
    for _ in 0..10 {
        let all = live(cache);
        let Some(&sequence) = all.get(rng.below(all.len().max(1))) else {
            ignore(driver::one::<OnCpu>(rng, cache));
            continue;
        };
        match rng.below(8) {
            0 | 1 => {
                let n = rng.pick(&[1, 1, 2, 30, BLOCK as usize + 3]);
                ignore(append(rng, cache, sequence, n));
            }
            2 => go_back(rng, cache, sequence),
            3 => {
                let at = rng.below(500) as i32;
                ignore(match cache.sequences_mut() {
                    Some(all) => all.seq_mark(sequence, at),
                    None => cache.mark(at),
                });
            }
            4 => {
                let Some(all) = cache.sequences_mut() else { continue };
                let target = 20 + rng.below(4) as i32;
                let end = if rng.chance(0.5) { i32::MAX } else { rng.below(400) as i32 };
                ignore(all.seq_cp(sequence, target, 0..end));
            }
            5 => ignore(grow_tree(rng, cache, sequence)),
            6 => {
                if let Ok(prefix) = cache.sharing().unwrap().freeze() {
                    cache.clear(true).unwrap();
                    let length = prefix.reach().below(rng.below(400) as i32, prefix.length());
                    ignore(cache.sharing().unwrap().attach(&prefix, length));
                }
            }
            _ => ignore(driver::one::<OnCpu>(rng, cache)),
        }
    }
    let _ = (cache.memory(), cache.report());
}

/// Rewinds a sequence to a length that it reports as reachable.
fn go_back(rng: &mut Rng, cache: &mut AnyCache, sequence: i32) {
    let at = rng.below(500) as i32;
    if let Some(all) = cache.sequences_mut() {
        let reached = all.seq_reachable(sequence, at).unwrap();
        if reached > 0 {
            match all.seq_rm(sequence, reached..i32::MAX) {
                Ok(()) => assert_eq!(all.seq_next(sequence).unwrap(), reached),
                // The sequence has candidates.
                Err(error) => assert_eq!(error.status(), Status::Step, "{error}"),
            }
        }
        return;
    }
    let reached = cache.reachable(at).unwrap();
    assert_eq!(cache.rewind_to_reachable(at).unwrap(), reached);
    assert_eq!(cache.next_position().unwrap(), reached);
}
