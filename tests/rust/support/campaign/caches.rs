//! Caches of sequences and trees, in every format. Their attention is compared with attention from first principles,
//! over the rows that each query sees in the model of tokens.
//!
//! Formats that round are compared over the rounded rows. A failure prints its seed; `ETKV_SEED=<seed>` runs only
//! that seed, `ETKV_RUNS=<n>` runs `n` seeds.

use etkv_core::{
    AttendCache, Cache, CacheConfig, CellsCache, Error, Growth, KvFormat, LayerConfig, LayerPolicy,
    Status, Step,
};

use crate::backend::{Backend, Tensor};
use crate::model::{Members, Model};
use crate::oracle::{self, Row};
use crate::slots::Id;
use crate::{for_seeds, Rng};

const N_HEADS: usize = 4;
const SCALE: f32 = 0.2;

/// Keys and values of one layer, by token.
#[derive(Default)]
struct StoredTensors {
    k: Vec<Row>,
    v: Vec<Row>,
}

impl StoredTensors {
    fn push<B: Backend>(
        &mut self,
        layer: &LayerConfig,
        [k, v]: [&[Row]; 2],
        formats: [KvFormat; 2],
    ) {
        let k = B::stored(k, formats[0]);
        self.v.extend(match layer.values_in_keys {
            true => oracle::first(&k, layer.v_head_dim),
            false => B::stored(v, formats[1]),
        });
        self.k.extend(k);
    }

    fn convert<B: Backend>(&mut self, layer: &LayerConfig, from: [KvFormat; 2], to: [KvFormat; 2]) {
        if self.k.is_empty() {
            return;
        }
        if to[0] != from[0] {
            self.k = B::stored(&self.k, to[0]);
        }
        if layer.values_in_keys {
            self.v = oracle::first(&self.k, layer.v_head_dim);
        } else if to[1] != from[1] {
            self.v = B::stored(&self.v, to[1]);
        }
    }
}

struct Run<B: Backend> {
    rng: Rng,
    cache: CellsCache<B::Store>,
    model: Model,
    layers: Vec<(LayerConfig, StoredTensors)>,
    formats: [KvFormat; 2],
    /// Whether rows still wait for their conversion at `quantized_kv_start`.
    awaits: bool,
    n_sequences: usize,
}

impl<B: Backend> Run<B> {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let format = |rng: &mut Rng| -> KvFormat { rng.pick(&oracle::FORMATS).parse().unwrap() };
        let mut formats = [format(&mut rng), format(&mut rng)];
        let max_step_tokens = rng.pick(&[3, 12, 40]);
        let layers: Vec<LayerConfig> =
            (0..1 + rng.below(3)).map(|_| oracle::random_layer(&mut rng)).collect();
        oracle::match_formats(&layers, &mut formats);
        let config = CacheConfig {
            layers: layers.clone(),
            capacity: rng.pick(&[40, 120]),
            max_step_tokens,
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
            ..CacheConfig::uniform(0, 1, 1, 1)
        };
        let formats = config.formats_at(0);
        let windowed =
            layers.iter().any(|layer| config.window(layer.policy).is_some_and(|w| w.slides()));
        Self {
            n_sequences: rng.pick(&[1, 2, 5]),
            model: Model::new(
                config.capacity,
                windowed.then_some(max_step_tokens.min(config.capacity)),
            ),
            layers: layers.iter().map(|&l| (l, StoredTensors::default())).collect(),
            awaits: config.quantized_kv_start.is_some(),
            cache: CellsCache::with_trees(config).unwrap(),
            formats,
            rng,
        }
    }

    /// Models `quantized_kv_start`: once the cache reaches this length, it quantizes its rows.
    fn quantize(&mut self) {
        let config = self.cache.config();
        let committed = self.model.committed();
        if self.awaits
            && config.quantized_kv_start.is_some_and(|tokens| committed >= tokens as usize)
        {
            self.awaits = false;
            let formats = [config.k_format, config.v_format];
            self.store_anew(formats);
        }
        assert_eq!(self.cache.formats(), self.formats);
    }

    fn sequence(&mut self) -> i32 {
        self.rng.below(self.n_sequences) as i32
    }

    /// Runs a step of some tokens or of the pending frontiers, and commits it or not.
    fn step(&mut self) {
        let pending = self.model.sequences().values().any(|held| held.pending() > 0);
        if !pending {
            let free: Vec<i32> = (0..self.n_sequences as i32)
                .filter(|&one| self.model.sequence(one).tree.is_empty())
                .collect();
            if free.is_empty() {
                return;
            }
            let most = self.model.max_step_tokens.unwrap_or(40) as usize;
            let n = if self.rng.chance(0.5) { 1 } else { 1 + self.rng.below(most) };
            let members: Vec<i32> = (0..n).map(|_| self.rng.pick(&free)).collect();
            self.cache.sequences_mut().unwrap().begin_step(&members).unwrap();
            self.model.declared = Some(members.into_iter().map(|one| vec![one]).collect());
            // Runs a step of tokens of two sequences, if both continue at the same position.
            let other = self.rng.pick(&free);
            let all = self.model.declared.iter().flatten().flatten();
            let all: Vec<i32> = all.copied().filter(|&one| one != other).collect();
            let alone = all.windows(2).all(|pair| pair[0] == pair[1]);
            if alone && all.len() == n && self.model.next(all[0]) == self.model.next(other) {
                let pair: Vec<i32> = vec![all[0].min(other), all[0].max(other)];
                let both: Vec<&[i32]> = vec![&pair; n];
                self.cache.sequences_mut().unwrap().begin_step_shared(&both).unwrap();
                self.model.declared = Some(vec![pair.clone(); n]);
            }
        }
        let Ok(owners) = self.model.owners(1) else {
            return;
        };
        // If a tree refuses the token, it does so at any position.
        let positions: Vec<i32> = (0..owners.len())
            .map(|token| self.model.expected(&owners, token, owners[token][0]).unwrap_or(0))
            .collect();
        let mut refusals = self.model.step_refusals(&owners, &positions);
        let config = self.cache.config();
        let most = config.quantized_kv_start.map(|tokens| tokens - 1 + config.max_step_tokens);
        let after = self.model.live().len() + positions.len();
        if self.awaits && most.is_some_and(|most| after > most as usize) {
            refusals.push(Status::Capacity);
        }
        if refusals.is_empty() {
            return self.run_step(&owners, &positions);
        }
        let error = self.cache.begin(&positions).unwrap_err();
        assert!(refusals.contains(&error.status()), "{error}, but expected {refusals:?}");
        if self.rng.chance(0.5) {
            self.cache.sequences_mut().unwrap().cancel_step().unwrap();
            self.model.declared = None;
        }
    }

    fn run_step(&mut self, owners: &[Members], positions: &[i32]) {
        let n = positions.len();
        let ids: Vec<Id> = self.model.write(positions);
        let stop_after = self.rng.chance(0.2).then(|| self.rng.below(self.layers.len() + 1));
        let length = self.cache.length();
        // In one layer the last value is not finite: such a step must be undone.
        let spoiled = self.rng.chance(0.1).then(|| self.rng.below(self.layers.len()));
        let mut step = Step::begin(&mut self.cache, positions).unwrap();
        for (index, (layer, rows)) in self.layers.iter_mut().enumerate() {
            let heads = layer.n_kv_heads as usize;
            let (kd, vd) = (layer.k_head_dim as usize, layer.v_head_dim as usize);
            let mut k = oracle::random_rows(&mut self.rng, n, heads, kd);
            // Values that are in keys are not read from this tensor.
            let mut v = oracle::random_rows(&mut self.rng, n, heads, vd);
            rows.push::<B>(layer, [&k, &v], self.formats);
            if stop_after.is_some_and(|stop| index >= stop) {
                continue;
            }
            let q = oracle::random_rows(&mut self.rng, n, N_HEADS, kd);
            if spoiled == Some(index) {
                let values = if layer.values_in_keys { &mut k } else { &mut v };
                values[n - 1][heads - 1][vd - 1] = f32::INFINITY;
            }
            let spec = step.update_and_fetch(index, &B::tensor(&k), &B::tensor(&v)).unwrap();
            let out = B::attend(&B::tensor(&q), &spec, SCALE).unwrap();
            drop(spec);
            step.eval(&[&out]).unwrap();
            if spoiled != Some(index) {
                assert_sees::<B>(&self.model, layer.policy, owners, &ids, (&q, &out), rows);
            }
        }
        let n_had = stop_after.unwrap_or(self.layers.len()).min(self.layers.len());
        if n_had > 0 && spoiled.is_none() && self.rng.chance(0.3) {
            // Calls a layer whose rows are already written, with other queries and with rows that would be visible if
            // they were written.
            let index = self.rng.below(n_had);
            let (layer, rows) = &self.layers[index];
            let heads = layer.n_kv_heads as usize;
            let (kd, vd) = (layer.k_head_dim as usize, layer.v_head_dim as usize);
            let k = oracle::random_rows(&mut self.rng, n, heads, kd);
            let v = oracle::random_rows(&mut self.rng, n, heads, vd);
            let q = oracle::random_rows(&mut self.rng, n, N_HEADS, kd);
            let spec = step.update_and_fetch(index, &B::tensor(&k), &B::tensor(&v)).unwrap();
            let out = B::attend(&B::tensor(&q), &spec, SCALE).unwrap();
            assert_sees::<B>(&self.model, layer.policy, owners, &ids, (&q, &out), rows);
        }
        let step = if self.rng.chance(0.3) {
            let number = step.set_aside().ok().unwrap();
            assert_eq!(self.cache.length(), length);
            if stop_after.is_some() {
                // The next call that changes the cache rolls the step back, together with its declaration.
                self.model.declared = None;
                return;
            }
            Step::resume(&mut self.cache, number).unwrap()
        } else {
            step
        };
        if stop_after.is_some() {
            drop(step);
        } else if self.rng.chance(0.5) {
            step.commit_unread(&[]).map_or_else(|error| refused(&error, spoiled), drop);
            let late = self.cache.length() > length;
            match spoiled {
                // The next call that changes the cache reads the values. If this call begins a step, the call after
                // it reads the values.
                None => {
                    self.model.commit(owners, &ids);
                    self.quantize();
                    if self.rng.chance(0.5) {
                        self.cache.check_unread().unwrap();
                    }
                }
                Some(_) if late => self.undo(spoiled, length),
                Some(_) => {}
            }
        } else {
            match step.commit(&[]) {
                Ok(()) => {
                    assert_eq!(spoiled, None);
                    self.model.commit(owners, &ids);
                    self.quantize();
                }
                Err(error) => refused(&error, spoiled),
            }
        }
    }

    /// Makes one of several calls detect that the values of the last step are not finite.
    fn undo(&mut self, spoiled: Option<usize>, length: i32) {
        self.model.declared = None;
        let tree_of = self.rng.chance(0.5).then(|| self.sequence());
        let mut number = None;
        if let Some(sequence) = tree_of {
            let cells = self.cache.sequences_mut().unwrap();
            cells.begin_step(&[sequence]).unwrap();
            let next = cells.seq_next(sequence).unwrap();
            if self.cache.can_extend(1) && self.cache.begin(&[next]).is_ok() {
                for (index, (layer, _)) in self.layers.iter().enumerate() {
                    let heads = layer.n_kv_heads as usize;
                    let k = oracle::random_rows(&mut self.rng, 1, heads, layer.k_head_dim as usize);
                    let v = oracle::random_rows(&mut self.rng, 1, heads, layer.v_head_dim as usize);
                    let (k, v) = (B::tensor(&k), B::tensor(&v));
                    drop(self.cache.update_and_fetch(index, &k, &v).unwrap());
                }
                self.cache.schedule(&[]).unwrap();
                number = self.cache.set_aside();
            } else {
                self.cache.sequences_mut().unwrap().cancel_step().unwrap();
            }
        }
        let error = match (self.rng.below(4), number) {
            (0, Some(number)) => Step::resume(&mut self.cache, number).unwrap().commit(&[]),
            (1, _) => self.cache.sequences_mut().unwrap().compact(),
            (2, _) => self.cache.sequences_mut().unwrap().seq_rm(0, 0..i32::MAX),
            _ => self.cache.check_unread(),
        };
        refused(&error.unwrap_err(), spoiled);
        assert_eq!(self.cache.length(), length);
        self.cache.sequences_mut().unwrap().cancel_step().unwrap();
    }

    fn fork_or_remove(&mut self) {
        let (source, target) = (self.sequence(), self.sequence());
        let next = self.model.next(source);
        let at = self.rng.below(next as usize + 1) as i32;
        let sequences = self.cache.sequences_mut().unwrap();
        match self.rng.below(6) {
            0 => {
                if sequences.seq_cp(source, target, 0..i32::MAX).is_ok() {
                    self.model.copy([source, target], &(0..i32::MAX));
                }
            }
            3 => {
                if sequences.seq_cp(source, target, 0..at).is_ok() {
                    self.model.copy([source, target], &(0..at));
                }
            }
            4 => {
                sequences.seq_keep(source).unwrap();
                self.model.keep(source);
            }
            1 => {
                if sequences.seq_rm(source, at..i32::MAX).is_ok() {
                    self.model.remove(source, &(at..i32::MAX));
                }
            }
            2 => {
                if sequences.seq_rm(source, 0..at).is_ok() {
                    self.model.remove(source, &(0..at));
                }
            }
            _ => sequences.compact().unwrap(),
        }
    }

    fn tree(&mut self) {
        let sequence = self.sequence();
        let held = self.model.sequence(sequence);
        let trees = self.cache.trees_mut().unwrap();
        if held.pending() == 0 && (held.tree.is_empty() || self.rng.chance(0.5)) {
            let nodes = held.tree.len();
            let parents: Vec<i32> = (0..1 + self.rng.below(6))
                .map(|offset| self.rng.below(nodes + offset + 1) as i32 - 1)
                .collect();
            if trees.propose(sequence, &parents).is_ok() {
                self.model.propose(sequence, &parents);
            }
        } else if !held.tree.is_empty() {
            let mut accepted: Vec<i32> = Vec::new();
            if held.written() > 0 {
                let node = self.rng.below(held.written());
                accepted = held.chain_up(node).into_iter().rev().map(|node| node as i32).collect();
            }
            trees.commit_tree(sequence, &accepted).unwrap();
            self.model.accept(sequence, &accepted);
            self.quantize();
        }
    }

    /// Converts stored rows.
    fn convert(&mut self) {
        let mut formats =
            [0, 1].map(|_| self.rng.pick(&oracle::FORMATS).parse::<KvFormat>().unwrap());
        oracle::match_formats(&self.cache.config().layers, &mut formats);
        self.cache.convert(formats[0], formats[1]).unwrap();
        self.awaits = false;
        self.store_anew(formats);
        assert_eq!(self.cache.formats(), formats);
    }

    fn clear(&mut self) {
        self.cache.clear(self.rng.chance(0.5)).unwrap();
        self.model.clear();
        self.formats = self.cache.formats();
        assert_eq!(self.formats, self.cache.config().formats_at(0));
        self.awaits = self.cache.config().quantized_kv_start.is_some();
    }

    fn store_anew(&mut self, formats: [KvFormat; 2]) {
        for (layer, rows) in &mut self.layers {
            rows.convert::<B>(layer, self.formats, formats);
        }
        self.formats = formats;
    }
}

/// Checks that this is the error of a step whose values in layer `spoiled` are not finite.
fn refused(error: &Error, spoiled: Option<usize>) {
    assert_eq!(error.status(), Status::InvalidArgument, "{error}");
    let layer = format!("(attention layer {} of", spoiled.expect("all values are finite"));
    assert!(error.message().contains(&layer), "{error}: expected {layer}");
}

/// Checks that queries attend to the rows that they see in the model.
fn assert_sees<B: Backend>(
    model: &Model,
    policy: LayerPolicy,
    owners: &[Members],
    ids: &[Id],
    (q, out): (&[Row], &Tensor<B>),
    rows: &StoredTensors,
) {
    let out = B::rows(out);
    for (query, row) in q.iter().enumerate() {
        let seen = model.visible(policy, owners, ids, query);
        let of = |rows: &[Row]| seen.iter().map(|&id| rows[id].clone()).collect::<Vec<_>>();
        let expected = oracle::attention(row, &of(&rows.k), &of(&rows.v), SCALE);
        oracle::assert_close(&out[query], &expected, 5e-5);
    }
}

pub fn attention_matches_the_model<B: Backend>() {
    for_seeds(125 / B::COST, |seed| {
        B::run(|| {
            let mut run = Run::<B>::new(seed);
            for _ in 0..40 {
                match run.rng.below(24) {
                    0 => run.convert(),
                    20 if run.rng.chance(0.3) => run.clear(),
                    1..=4 => run.fork_or_remove(),
                    5..=8 => run.tree(),
                    _ => run.step(),
                }
                assert_eq!(run.cache.length(), run.model.live().len() as i32);
            }
        });
    });
}
