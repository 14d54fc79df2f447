//! Generated operations on several equal caches, whose results must be equal, bit for bit.

use etkv_core::{
    AttendCache, CacheConfig, CellsCache, ContiguousCache, Error, Growth, KvFormat, MemoryBudget,
    RecurrentLayer, Result, Step,
};

use crate::backend::Backend;
use crate::recurrence::{self, Token};
use crate::{oracle, Rng};

const N_HEADS: usize = 4;
const SEQUENCES: usize = 4;

pub type AnyCache<B> = Box<dyn AttendCache<Store = <B as Backend>::Store>>;

/// The kind and config of a cache, from a seed.
#[derive(Debug, Clone)]
pub struct Shape {
    pub kind: usize,
    pub config: CacheConfig,
}

impl Shape {
    pub fn new(rng: &mut Rng) -> Self {
        let format = |rng: &mut Rng| -> KvFormat { rng.pick(&oracle::FORMATS).parse().unwrap() };
        let layers = (0..1 + rng.below(3)).map(|_| oracle::random_layer(rng));
        let layers: Vec<_> = layers.collect();
        let mut formats = [format(rng), format(rng)];
        oracle::match_formats(&layers, &mut formats);
        let config = CacheConfig {
            layers,
            capacity: rng.pick(&[40, 120, 300]),
            max_step_tokens: rng.pick(&[3, 12, 40]),
            growth: rng.pick(&[
                Growth::Doubling { first: 8 },
                Growth::Step { step: 16 },
                Growth::Exact,
                Growth::Upfront,
            ]),
            k_format: formats[0],
            v_format: formats[1],
            quantized_kv_start: rng.chance(0.3).then(|| rng.pick(&[1, 10, 25])),
            float_format: rng.pick(&["f32", "f16", "bf16"]).parse().unwrap(),
            recurrent_layers: if rng.chance(0.4) { recurrent_layers(rng) } else { Vec::new() },
            anchors: rng.pick(&[1, 2, 3]),
            checkpoints: rng.pick(&[0, 2, 32]),
        };
        Self { kind: rng.below(3), config }
    }

    pub fn make<B: Backend>(&self) -> AnyCache<B> {
        self.try_make::<B>().unwrap()
    }

    pub fn try_make<B: Backend>(&self) -> Result<AnyCache<B>> {
        let config = self.config.clone();
        Ok(match self.kind {
            0 if !config.recurrent_layers.is_empty() => {
                Box::new(CellsCache::<B::Store>::contiguous(config)?)
            }
            0 => Box::new(ContiguousCache::<B::Store>::new(config)?),
            1 => Box::new(CellsCache::<B::Store>::new(config)?),
            _ => Box::new(CellsCache::<B::Store>::with_trees(config)?),
        })
    }
}

fn recurrent_layers(rng: &mut Rng) -> Vec<RecurrentLayer> {
    let layer = |rng: &mut Rng| match rng.below(2) {
        0 => RecurrentLayer::Convolution { channels: 3, width: rng.pick(&[2, 4]) },
        _ => RecurrentLayer::Recurrence {
            k_heads: 1,
            heads: rng.pick(&[1, 2]),
            k_dim: 2,
            v_dim: 3,
            channel_decay: rng.chance(0.3),
        },
    };
    (0..1 + rng.below(2)).map(|_| layer(rng)).collect()
}

/// Runs a generated operation on each cache, and checks that all results are equal.
pub fn operate<B: Backend>(rng: &mut Rng, caches: &mut [AnyCache<B>]) {
    let seed = rng.next_u64();
    let mut answers = caches.iter_mut().map(|cache| {
        let answer = one::<B>(&mut Rng::new(seed), cache);
        let tree = |&sequence: &i32| cache.trees().map(|trees| trees.tree_len(sequence));
        let live = cache.sequences().map(|all| all.live_sequences()).unwrap_or_default();
        let held = live.iter().map(|&sequence| {
            let all = cache.sequences().unwrap();
            (all.seq_positions(sequence), all.seq_rewindable_to(sequence), tree(&sequence))
        });
        let held: Vec<_> = held.collect();
        (answer, cache.length(), cache.formats(), cache.rewindable_to(), held)
    });
    let first = answers.next().unwrap();
    for answer in answers {
        assert_eq!(answer, first);
    }
}

/// Runs an operation. Returns the bits of the rows that the queries of a step see.
pub fn one<B: Backend>(rng: &mut Rng, cache: &mut AnyCache<B>) -> Result<Vec<u32>> {
    let done = |result: Result<()>| result.map(|()| Vec::new());
    match rng.below(24) {
        0 if rng.chance(0.3) => done(cache.clear(rng.chance(0.5))),
        1 if rng.chance(0.4) => {
            let formats = [rng.pick(&oracle::FORMATS), rng.pick(&oracle::FORMATS)];
            let [k, v] = formats.map(|name| name.parse().unwrap());
            done(cache.convert(k, v))
        }
        2 if rng.chance(0.5) => {
            // Marks of future positions are not saved, so only past positions are marked.
            let at = rng.below(cache.length() as usize + 1) as i32;
            done(cache.mark(at).map(drop))
        }
        2 | 3 => {
            let to = rng.below(cache.length() as usize + 2) as i32;
            done(cache.rewind(to))
        }
        4..=7 if cache.sequences().is_some() => done(change::<B>(rng, cache)),
        8..=11 if cache.trees().is_some() => done(grow_tree::<B>(rng, cache)),
        _ => step::<B>(rng, cache),
    }
}

fn change<B: Backend>(rng: &mut Rng, cache: &mut AnyCache<B>) -> Result<()> {
    let (source, target) = (rng.below(SEQUENCES) as i32, rng.below(SEQUENCES) as i32);
    let all = cache.sequences_mut().unwrap();
    let at = rng.below(all.seq_next(source)? as usize + 1) as i32;
    match rng.below(6) {
        0 => all.seq_cp(source, target, 0..i32::MAX),
        1 => all.seq_cp(source, target, 0..at),
        2 => all.seq_rm(source, at..i32::MAX),
        3 => all.seq_rm(source, 0..at),
        4 if rng.chance(0.3) => all.seq_keep(source),
        _ => all.compact(),
    }
}

fn grow_tree<B: Backend>(rng: &mut Rng, cache: &mut AnyCache<B>) -> Result<()> {
    let sequence = rng.below(SEQUENCES) as i32;
    let trees = cache.trees_mut().unwrap();
    let nodes = trees.tree_len(sequence)?;
    if nodes == 0 || rng.chance(0.4) {
        let parents: Vec<i32> =
            (0..1 + rng.below(5)).map(|offset| rng.below(nodes + offset + 1) as i32 - 1).collect();
        trees.propose(sequence, &parents)
    } else {
        let accepted = if rng.chance(0.7) { vec![0] } else { vec![] };
        trees.commit_tree(sequence, &accepted)
    }
}

/// Runs a step of some sequences, or of the pending frontiers.
fn step<B: Backend>(rng: &mut Rng, cache: &mut AnyCache<B>) -> Result<Vec<u32>> {
    let most = cache.config().max_step_tokens as usize;
    let n = if rng.chance(0.5) { 1 } else { 1 + rng.below(most.min(20)) };
    let mut positions = Vec::new();
    if let Some(all) = cache.sequences_mut() {
        let members: Vec<i32> = (0..n).map(|_| rng.below(SEQUENCES) as i32).collect();
        let mut nexts = [0; SEQUENCES];
        for (sequence, next) in (0..).zip(&mut nexts) {
            *next = all.seq_next(sequence)?;
        }
        for &member in &members {
            positions.push(nexts[member as usize]);
            nexts[member as usize] += 1;
        }
        all.begin_step(&members)?;
    } else {
        let length = cache.length();
        positions.extend(length..length + n as i32);
    }
    if let Err(error) = cache.begin(&positions) {
        if let Some(all) = cache.sequences_mut() {
            all.cancel_step()?;
        }
        // If the memory budget refuses the step, the refusal is the result: pending frontiers are not tried.
        if MemoryBudget::is_refusal(&error) {
            return Err(error);
        }
        return frontiers::<B>(rng, cache, error);
    }
    cache.abort();
    forward::<B>(rng, cache, &positions)
}

/// Runs the pending frontiers, after a step of tokens was refused.
fn frontiers<B: Backend>(
    rng: &mut Rng,
    cache: &mut AnyCache<B>,
    refused: Error,
) -> Result<Vec<u32>> {
    let Some(trees) = cache.trees() else {
        return Err(refused);
    };
    // These are the positions of a single frontier after each sequence. For deeper trees the step is refused.
    let mut positions = Vec::new();
    for sequence in trees.live_sequences() {
        let n = trees.tree_len(sequence)?;
        positions.extend(vec![trees.seq_next(sequence)?; n]);
    }
    if let Err(error) = cache.begin(&positions) {
        return Err(if MemoryBudget::is_refusal(&error) { error } else { refused });
    }
    cache.abort();
    forward::<B>(rng, cache, &positions)
}

/// Runs a step. Returns the bits of the rows that its queries see.
pub fn forward<B: Backend>(
    rng: &mut Rng,
    cache: &mut AnyCache<B>,
    positions: &[i32],
) -> Result<Vec<u32>> {
    let layers = cache.config().layers.clone();
    let recurrent = cache.config().recurrent_layers.clone();
    let n = positions.len();
    let mut bits = Vec::new();
    let mut step = Step::begin(&mut **cache, positions)?;
    for (id, &layer) in recurrent.iter().enumerate() {
        let tokens: Vec<Token> = (0..n).map(|_| rng.next_u64()).collect();
        let mut outputs = Vec::new();
        step.update_recurrent(id, &mut |spec| {
            recurrence::planned::<B>(id, layer, &tokens, spec, &mut outputs)
        })?;
        bits.extend(outputs.iter().flatten().flatten().map(|value| value.to_bits()));
    }
    for (id, layer) in layers.iter().enumerate() {
        let heads = layer.n_kv_heads as usize;
        let (kd, vd) = (layer.k_head_dim as usize, layer.v_head_dim as usize);
        let k = oracle::random_rows(rng, n, heads, kd);
        let v = oracle::random_rows(rng, n, heads, vd);
        let q = oracle::random_rows(rng, n, N_HEADS, kd);
        let spec = step.update_and_fetch(id, &B::tensor(&k), &B::tensor(&v))?;
        let out = B::attend(&B::tensor(&q), &spec, 0.2)?;
        drop(spec);
        step.eval(&[&out])?;
        bits.extend(B::rows(&out).iter().flatten().flatten().map(|value| value.to_bits()));
    }
    if rng.chance(0.3) {
        step.commit_unread(&[])?;
    } else {
        step.commit(&[])?;
    }
    Ok(bits)
}
