//! Caches of models with recurrent layers. They are compared with each sequence run alone from its beginning. In
//! recurrent layers the results must have the same bits, whatever was forked, cut, aborted, saved, shared or proposed
//! earlier.

mod changes;
mod steps;
mod text;

use std::collections::BTreeMap;
use std::marker::PhantomData;

use etkv_core::bookkeeping::BLOCK;
use etkv_core::{
    Cache, CacheConfig, CellsCache, Growth, KvFormat, LayerConfig, LayerPolicy, RecurrentLayer,
};

use crate::backend::Backend;
use crate::recurrence::{Kernels, Plain, Token};
use crate::{for_seeds, Rng};
use text::Text;

const N_HEADS: usize = 2;
const DIM: usize = 8;
const SCALE: f32 = 0.3;

struct Run<B: Backend, K> {
    rng: Rng,
    cache: CellsCache<B::Store>,
    texts: BTreeMap<i32, Text>,
    fresh: Token,
    /// Whether the model knows each reachable position: no checkpoint was dropped to make room, and no window slides.
    /// Otherwise it knows positions that may be reachable.
    exact: bool,
    /// Whether windows slide.
    slides: bool,
    /// Whether there are few sequences, with long texts and many marks. Otherwise texts are mostly too short for a
    /// rewind to a checkpoint.
    long: bool,
    aborts: bool,
    /// The first output that does not have the bits of its text alone.
    difference: Option<String>,
    kernels: PhantomData<K>,
}

const SEQUENCES: usize = 4;

/// Returns an empty cache of a generated kind.
fn any_kind<B: Backend>(rng: &mut Rng, config: CacheConfig) -> CellsCache<B::Store> {
    let cache = match rng.below(3) {
        0 => CellsCache::contiguous(config),
        1 => CellsCache::new(config),
        _ => CellsCache::with_trees(config),
    };
    cache.unwrap()
}

impl<B: Backend, K: Kernels<B>> Run<B, K> {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let long = rng.chance(0.3);
        let convolution = |rng: &mut Rng| RecurrentLayer::Convolution {
            channels: rng.pick(&[1, 5]),
            width: rng.pick(&[1, 2, 4, 9]),
        };
        let recurrence = |rng: &mut Rng| {
            let k_heads = rng.pick(&[1, 2]);
            RecurrentLayer::Recurrence {
                k_heads,
                heads: k_heads * rng.pick(&[1, 2]),
                k_dim: rng.pick(&[2, 3]),
                v_dim: rng.pick(&[2, 4]),
                channel_decay: rng.chance(0.3),
            }
        };
        let recurrent_layers = (0..1 + rng.below(3)).map(|_| match rng.below(2) {
            0 => convolution(&mut rng),
            _ => recurrence(&mut rng),
        });
        let recurrent_layers: Vec<_> = recurrent_layers.collect();
        let layers: Vec<LayerConfig> = (0..rng.below(3).max(usize::from(long)))
            .map(|_| LayerConfig {
                n_kv_heads: 1,
                k_head_dim: DIM as i32,
                v_head_dim: DIM as i32,
                policy: match rng.below(if long { 4 } else { 6 }) {
                    0 | 1 => {
                        LayerPolicy::Window { window: rng.pick(&[2, 30]), sinks: rng.pick(&[0, 3]) }
                    }
                    2 => LayerPolicy::Chunk { chunk: rng.pick(&[2, 30]) },
                    _ => LayerPolicy::Full,
                },
                values_in_keys: false,
            })
            .collect();
        let capacity = if long { 900 } else { rng.pick(&[150, 400, 900]) };
        let config = CacheConfig {
            layers,
            recurrent_layers,
            anchors: if long { 1 } else { rng.pick(&[1, 2, 2, 3]) },
            checkpoints: rng.pick(if long { &[1, 2, 256] } else { &[0, 2, 256] }),
            capacity,
            max_step_tokens: if long { 80 } else { rng.pick(&[20, 150]) },
            growth: rng.pick(&[
                Growth::Doubling { first: 8 },
                Growth::Step { step: 16 },
                Growth::Exact,
                Growth::Upfront,
            ]),
            ..CacheConfig::uniform(0, 1, 1, 1).stored_as(KvFormat::F32)
        };
        let slides = config.step_limit() < capacity;
        let exact = config.checkpoints == 256 && !slides;
        Self {
            cache: any_kind::<B>(&mut rng, config),
            rng,
            texts: BTreeMap::new(),
            fresh: 1,
            exact,
            slides,
            long,
            aborts: true,
            difference: None,
            kernels: PhantomData,
        }
    }

    fn single(&self) -> bool {
        self.cache.sequences().is_none()
    }

    fn text(&self, sequence: i32) -> Text {
        self.texts.get(&sequence).cloned().unwrap_or_default()
    }

    /// Returns whether a rewind of a text to this position must succeed.
    fn must_reach(&self, text: &Text, position: i32) -> bool {
        if self.exact {
            return text.reaches(position);
        }
        let least = if self.slides { text.next() } else { text.low };
        position == 0 || (least..=text.next()).contains(&position)
    }

    /// Returns the greatest position at or before `position` to which the sequence can be rewound.
    fn reachable(&self, sequence: i32, position: i32) -> i32 {
        let reachable = match self.cache.sequences() {
            None => self.cache.reachable(position),
            Some(all) => all.seq_reachable(sequence, position),
        };
        let (reachable, text) = (reachable.unwrap(), self.text(sequence));
        assert!(reachable <= position && text.reaches(reachable), "{reachable} of {text:?}");
        let must = (0..=position.min(text.next())).rev().find(|&at| self.must_reach(&text, at));
        assert!(reachable >= must.unwrap_or(0), "{reachable}, not {must:?}, of {text:?}");
        reachable
    }

    fn n_sequences(&self) -> usize {
        if self.long {
            2
        } else {
            SEQUENCES
        }
    }

    fn sequence(&mut self) -> i32 {
        if self.single() {
            0
        } else {
            self.rng.below(self.n_sequences()) as i32
        }
    }

    /// Returns a position to which a text may be cut. Long texts are cut near their end or at a checkpoint.
    fn position(&mut self, text: &Text) -> i32 {
        let checkpoints: Vec<i32> = text.checkpoints.iter().copied().collect();
        match self.rng.below(4) {
            0 | 1 if self.long && !checkpoints.is_empty() => self.rng.pick(&checkpoints),
            0..=2 if self.long => {
                text.next() - self.rng.below(text.tokens.len().min(80) + 1) as i32
            }
            _ => self.rng.below(text.tokens.len() + 1) as i32,
        }
    }

    fn token(&mut self) -> Token {
        self.fresh += 1;
        self.fresh
    }

    /// Returns the number of tokens of the next step: small or large.
    fn count(&mut self) -> usize {
        let most = (self.cache.config().step_limit() as usize).min(200);
        match self.rng.below(3) {
            0 => 1,
            1 if !self.long => 1 + self.rng.below(most.min(8)),
            _ => 1 + self.rng.below(most),
        }
    }

    fn check(&self) {
        let live: Vec<&Text> = self.texts.values().filter(|text| text.next() > 0).collect();
        if let Some(all) = self.cache.sequences() {
            for sequence in 0..SEQUENCES as i32 {
                let text = self.text(sequence);
                assert_eq!(all.seq_next(sequence).unwrap(), text.next());
                let least = all.seq_rewindable_to(sequence).unwrap();
                let is_low = if self.slides { least >= text.low } else { least == text.low };
                assert!(is_low, "{least}: {text:?}");
                self.check_checkpoints(&text, &all.seq_checkpoints(sequence).unwrap());
            }
        } else if let Some(text) = live.first() {
            assert_eq!(self.cache.next_position().unwrap(), text.next());
            self.check_checkpoints(text, &self.cache.checkpoints().unwrap());
        }
        if live.is_empty() && self.texts.values().all(|text| text.tree.parents.is_empty()) {
            assert_eq!(self.cache.memory().used, 0, "nothing stays of removed sequences");
        }
    }

    fn check_checkpoints(&self, text: &Text, found: &[i32]) {
        let known = |position: &i32| text.checkpoints.contains(position);
        assert!(found.iter().all(known), "{found:?}: {text:?}");
        assert!(!self.exact || found.len() == text.checkpoints.len(), "{found:?}: {text:?}");
    }
}

pub fn recurrent_layers_answer_as_if_each_text_ran_alone<B: Backend>() {
    texts_run_as_if_alone::<B, Plain>(70);
}

/// Runs generated operations of this many seeds, with the layers computed by `K`.
pub fn texts_run_as_if_alone<B: Backend, K: Kernels<B>>(seeds: u64) {
    for_seeds(seeds, |seed| assert_eq!(first_difference::<B, K>(seed), None));
}

/// Runs generated operations of a seed, with the layers computed by `K`, until an output does not have the bits of its
/// text alone. Returns that output, if there is one.
pub fn first_difference<B: Backend, K: Kernels<B>>(seed: u64) -> Option<String> {
    B::run(|| {
        let mut run = Run::<B, K>::new(seed);
        for _ in 0..if run.long { 60 } else { 40 } {
            let operation = match run.long && run.rng.chance(0.5) {
                true => run.rng.pick(&[3, 9, 19, 19]),
                false => run.rng.below(20),
            };
            match operation {
                0 | 1 => run.save_and_load(),
                2 => run.freeze_and_attach(),
                3..=5 => run.cut_or_fork(),
                6..=8 => run.tree(),
                9 | 10 => run.mark_or_ask(),
                11 if run.rng.chance(0.2) => {
                    run.cache.clear(run.rng.chance(0.5)).unwrap();
                    run.texts.clear();
                }
                12 if !run.single() => run.cache.sequences_mut().unwrap().compact().unwrap(),
                _ => run.step(),
            }
            run.check();
            if run.difference.is_some() {
                break;
            }
        }
        run.difference
    })
}

/// A mark that was set before the first step of a text applies to that text, even if the step replaces another text.
pub fn marks_hold_for_the_text_that_begins_next<B: Backend>() {
    B::run(|| {
        let fits = |run: &Run<B, Plain>| run.single() && run.exact;
        let mut run = (0..).map(Run::<B, Plain>::new).find(fits).unwrap();
        run.aborts = false;
        let read = |run: &mut Run<B, Plain>, first: Token, n: i32| {
            let text: Vec<Token> = (first..).take(n as usize).collect();
            let paths: Vec<Vec<Token>> = (1..=text.len()).map(|end| text[..end].to_vec()).collect();
            assert!(run.forward(&paths, &(0..n).collect::<Vec<_>>()));
        };
        read(&mut run, 1000, 20);
        assert_eq!(run.cache.mark(BLOCK + 10).unwrap(), BLOCK);
        read(&mut run, 2000, BLOCK + 20);
        assert_eq!(run.cache.checkpoints().unwrap(), [BLOCK]);
        assert_eq!(run.difference, None);
    });
}

pub fn memory_of_recurrent_layers_matches_estimates<B: Backend>() {
    for_seeds(12, |seed| {
        B::run(|| {
            let mut run = Run::<B, Plain>::new(seed);
            // A step that is rolled back keeps the buffers that it allocated.
            run.aborts = false;
            if run.cache.trees().is_some() {
                return;
            }
            let estimate = |run: &Run<B, Plain>, length: i32| match run.single() {
                true => run.cache.config().estimate(length),
                false => run.cache.config().estimate_shared(length),
            };
            let mut text = Vec::new();
            loop {
                let n = run.count().min(run.cache.config().capacity as usize - text.len());
                if n == 0 {
                    break;
                }
                let start = text.len() as i32;
                text.extend((0..n).map(|_| run.token()));
                let paths: Vec<Vec<Token>> =
                    (start as usize..text.len()).map(|end| text[..=end].to_vec()).collect();
                let positions: Vec<i32> = (start..text.len() as i32).collect();
                let committed = run.forward(&paths, &positions);
                assert_eq!(run.difference, None);
                if !committed {
                    text.truncate(start as usize);
                    continue;
                }
                let (found, length) = (run.cache.memory(), text.len() as i32);
                assert_eq!(
                    found.recurrent_layers,
                    estimate(&run, length).recurrent_layers,
                    "{length}"
                );
                assert!(found.allocated <= found.at_capacity);
            }
        });
    });
}
