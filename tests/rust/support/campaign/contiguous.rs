//! The contiguous cache, compared with a slow and simple model of it over generated operations.
//!
//! A failure prints its seed; `ETKV_SEED=<seed>` runs only that seed, `ETKV_RUNS=<n>` runs `n` seeds.

use etkv_core::{
    AttendCache, Cache, CacheConfig, ContiguousCache, Growth, KvFormat, LayerConfig, LayerPolicy,
    Status, Step,
};

use super::ones;
use crate::backend::{Backend, Tensor};
use crate::model::is_seen;
use crate::oracle::{self, Rows};
use crate::{for_seeds, Rng};

const N_HEADS: usize = 4;
const SCALE: f32 = 0.3;

/// The expected contents of a cache: rows by position, without slots or buffers.
struct Model {
    layers: Vec<(LayerConfig, Rows, Rows)>,
    capacity: usize,
}

impl Model {
    fn length(&self) -> usize {
        self.layers[0].1.len()
    }

    fn truncate(&mut self, length: usize) {
        for (_, k, v) in &mut self.layers {
            k.truncate(length);
            v.truncate(length);
        }
    }
}

struct Run<B: Backend> {
    rng: Rng,
    cache: ContiguousCache<B::Store>,
    model: Model,
    formats: [KvFormat; 2],
    /// Whether rows still wait for their conversion at `quantized_kv_start`.
    awaits: bool,
    /// Whether the sequence has been rewound since it was last cleared.
    has_rewound: bool,
}

impl<B: Backend> Run<B> {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        // Float formats support any head_dim.
        let floats = rng.chance(0.5);
        let any = if floats { &oracle::FORMATS[..3] } else { &oracle::FORMATS[..] };
        let dims: &[i32] = if floats { &[4, 8, 16] } else { &[64, 128] };
        let format = |rng: &mut Rng| -> KvFormat { rng.pick(any).parse().unwrap() };
        let layers: Vec<LayerConfig> = (0..rng.below(3) + 1)
            .map(|_| {
                let layer = LayerConfig {
                    n_kv_heads: rng.pick(&[1, 2, 4]),
                    k_head_dim: rng.pick(dims),
                    v_head_dim: rng.pick(dims),
                    policy: match rng.below(3) {
                        0 => LayerPolicy::Full,
                        1 => LayerPolicy::Chunk { chunk: rng.pick(&[1, 5, 30]) },
                        _ => LayerPolicy::Window {
                            window: rng.pick(&[1, 5, 30]),
                            sinks: rng.pick(&[0, 0, 3]),
                        },
                    },
                    values_in_keys: false,
                };
                oracle::maybe_in_keys(&mut rng, layer)
            })
            .collect();
        let mut formats = [format(&mut rng), format(&mut rng)];
        oracle::match_formats(&layers, &mut formats);
        let config = CacheConfig {
            layers: layers.clone(),
            capacity: rng.pick(&[1, 7, 64, 200]),
            max_step_tokens: 40,
            growth: Growth::Doubling { first: rng.pick(&[1, 5, 16, 500]) },
            k_format: formats[0],
            v_format: formats[1],
            quantized_kv_start: rng.chance(0.3).then(|| rng.pick(&[1, 20, 50])),
            float_format: rng.pick(&["f32", "f16", "bf16"]).parse().unwrap(),
            ..CacheConfig::uniform(0, 1, 1, 1)
        };
        let capacity = config.capacity as usize;
        Self {
            model: Model {
                layers: layers.into_iter().map(|layer| (layer, vec![], vec![])).collect(),
                capacity,
            },
            formats: config.formats_at(0),
            awaits: config.quantized_kv_start.is_some(),
            has_rewound: false,
            cache: ContiguousCache::new(config).unwrap(),
            rng,
        }
    }

    /// Runs a step that is committed, or dropped before its end.
    fn step(&mut self) {
        let length = self.model.length();
        let start = if self.rng.chance(0.2) { self.rng.below(length + 1) } else { length };
        let least = self.cache.rewindable_to().unwrap() as usize;
        let start = if start == 0 { 0 } else { start.max(least) };
        self.has_rewound |= start != length;
        let room = self.model.capacity - start;
        if room == 0 {
            return self.refused(&[start as i32], Status::Capacity);
        }
        let n = if self.rng.chance(0.5) { 1 } else { 1 + self.rng.below(room.min(40)) };
        let positions: Vec<i32> = (start..start + n).map(|position| position as i32).collect();
        let stop_after = self.rng.chance(0.25).then(|| self.rng.below(self.model.layers.len() + 1));

        let mut step = Step::begin(&mut self.cache, &positions).unwrap();
        let mut written = Vec::new();
        for (id, (layer, k_rows, v_rows)) in self.model.layers.iter().enumerate() {
            if stop_after == Some(id) {
                break;
            }
            let heads = layer.n_kv_heads as usize;
            let k = oracle::random_rows(&mut self.rng, n, heads, layer.k_head_dim as usize);
            let v = oracle::random_rows(&mut self.rng, n, heads, layer.v_head_dim as usize);
            let q = oracle::random_rows(&mut self.rng, n, N_HEADS, layer.k_head_dim as usize);
            let spec = step.update_and_fetch(id, &B::tensor(&k), &B::tensor(&v)).unwrap();
            let out = B::attend(&B::tensor(&q), &spec, SCALE).unwrap();
            drop(spec);
            step.eval(&[&out]).unwrap();

            let stored = |rows: &Rows, new: &Rows, format| -> Rows {
                rows[..start].iter().cloned().chain(B::stored(new, format)).collect()
            };
            let all_k = stored(k_rows, &k, self.formats[0]);
            let all_v = match layer.values_in_keys {
                true => oracle::first(&all_k, layer.v_head_dim),
                false => stored(v_rows, &v, self.formats[1]),
            };
            assert_sees::<B>(layer.policy, start, (&q, &out), &all_k, &all_v);
            written.push((all_k, all_v));
        }
        if !written.is_empty() && self.rng.chance(0.3) {
            // Calls a layer whose rows are already written, with other queries and with rows that would be visible if
            // they were written.
            let id = self.rng.below(written.len());
            let layer = self.model.layers[id].0;
            let heads = layer.n_kv_heads as usize;
            let k = oracle::random_rows(&mut self.rng, n, heads, layer.k_head_dim as usize);
            let v = oracle::random_rows(&mut self.rng, n, heads, layer.v_head_dim as usize);
            let q = oracle::random_rows(&mut self.rng, n, N_HEADS, layer.k_head_dim as usize);
            let spec = step.update_and_fetch(id, &B::tensor(&k), &B::tensor(&v)).unwrap();
            let out = B::attend(&B::tensor(&q), &spec, SCALE).unwrap();
            assert_sees::<B>(layer.policy, start, (&q, &out), &written[id].0, &written[id].1);
        }
        let step = if self.rng.chance(0.3) {
            let number = step.set_aside().ok().unwrap();
            assert_eq!(self.cache.length() as usize, length);
            if stop_after.is_some() {
                // The next call that changes the cache rolls the step back.
                return;
            }
            Step::resume(&mut self.cache, number).unwrap()
        } else {
            step
        };
        if stop_after.is_some() {
            // Without a commit the cache is unchanged, even if the step overwrote rows.
            drop(step);
        } else {
            step.commit(&[]).unwrap();
            for (layer, (k, v)) in self.model.layers.iter_mut().zip(written) {
                (layer.1, layer.2) = (k, v);
            }
            self.quantize();
        }
    }

    /// Models `quantized_kv_start`: once the cache reaches this length, it quantizes its rows.
    fn quantize(&mut self) {
        let config = self.cache.config();
        let length = self.model.length() as i32;
        if self.awaits && config.quantized_kv_start.is_some_and(|tokens| length >= tokens) {
            self.awaits = false;
            self.formats = [config.k_format, config.v_format];
            for (layer, k, v) in &mut self.model.layers {
                *k = B::stored(k, self.formats[0]);
                *v = match layer.values_in_keys {
                    true => oracle::first(k, layer.v_head_dim),
                    false => B::stored(v, self.formats[1]),
                };
            }
        }
        assert_eq!(self.cache.formats(), self.formats);
    }

    fn refused(&mut self, positions: &[i32], status: Status) {
        assert_eq!(self.cache.begin(positions).unwrap_err().status(), status, "{positions:?}");
    }

    fn bad_positions(&mut self) {
        let length = self.model.length() as i32;
        match self.rng.below(4) {
            0 => self.refused(&[length + 1], Status::Position),
            1 => self.refused(&[-1], Status::Position),
            2 => self.refused(&[], Status::InvalidArgument),
            _ => self.refused(&[length, length], Status::Position),
        }
    }

    fn rewind(&mut self) {
        let length = self.model.length();
        let to = self.rng.below(length + 3);
        let least = self.cache.rewindable_to().unwrap() as usize;
        let result = self.cache.rewind(to as i32);
        if to <= length && (to == 0 || to >= least) {
            result.unwrap();
            self.has_rewound |= to < length;
            self.model.truncate(to);
        } else {
            assert_eq!(result.unwrap_err().status(), Status::Position);
        }
    }

    fn clear(&mut self) {
        self.has_rewound = false;
        let release = self.rng.chance(0.5);
        self.cache.clear(release).unwrap();
        self.model.truncate(0);
        self.formats = self.cache.config().formats_at(0);
        self.awaits = self.cache.config().quantized_kv_start.is_some();
        if release {
            assert_eq!(self.cache.memory().allocated, 0);
        }
    }

    fn check(&self) {
        let (length, capacity) = (self.model.length(), self.model.capacity);
        assert_eq!(self.cache.length() as usize, length);
        for n in [0, 1, capacity - length, capacity - length + 1] {
            assert_eq!(self.cache.can_extend(n as i32), length + n <= capacity, "{n}");
        }
        let memory = self.cache.memory();
        let config = self.cache.config();
        if self.formats == config.formats_at(length as i32) {
            // After a rewind, windows may have dropped rows that a sequence of this length would keep.
            let kept = config.estimate(length as i32).used;
            assert!(memory.used <= kept);
            assert!(memory.used == kept || self.has_rewound);
        }
        assert_eq!(memory.at_capacity, config.at_capacity());
        assert!(memory.allocated >= memory.used && memory.allocated <= memory.at_capacity);
    }
}

/// Checks that queries at or after position `start` attend to the rows that they see.
fn assert_sees<B: Backend>(
    policy: LayerPolicy,
    start: usize,
    (q, out): (&Rows, &Tensor<B>),
    k: &Rows,
    v: &Rows,
) {
    let out = B::rows(out);
    for (query, row) in q.iter().enumerate() {
        let at = start + query;
        let of = |rows: &Rows| -> Rows {
            (0..=at)
                .filter(|&p| is_seen(policy, at as i32, p as i32))
                .map(|p| rows[p].clone())
                .collect()
        };
        let expected = oracle::attention(row, &of(k), &of(v), SCALE);
        oracle::assert_close(&out[query], &expected, 5e-5);
    }
}

pub fn equals_a_list_of_rows_over_generated_operations<B: Backend>() {
    for_seeds(40, |seed| {
        B::run(|| {
            let mut run = Run::<B>::new(seed);
            for _ in 0..40 {
                match run.rng.below(20) {
                    0 => run.clear(),
                    1 | 2 => run.rewind(),
                    3 => run.bad_positions(),
                    _ => run.step(),
                }
                run.check();
            }
        });
    });
}

fn one_layer<B: Backend>(capacity: i32, min_chunk: i32) -> ContiguousCache<B::Store> {
    let config = CacheConfig {
        growth: Growth::Doubling { first: min_chunk },
        ..CacheConfig::uniform(1, 2, 64, capacity).stored_as(KvFormat::F32)
    };
    ContiguousCache::new(config).unwrap()
}

fn append<B: Backend>(cache: &mut ContiguousCache<B::Store>, n: usize) {
    let (rows, q) = (ones::<B>(2, n, 64), ones::<B>(4, n, 64));
    let length = cache.length();
    let positions: Vec<i32> = (length..length + n as i32).collect();
    let mut step = Step::begin(cache, &positions).unwrap();
    let spec = step.update_and_fetch(0, &rows, &rows).unwrap();
    let out = B::attend(&q, &spec, 0.1).unwrap();
    drop(spec);
    step.commit(&[&out]).unwrap();
}

pub fn buffers_match_estimates_at_every_growth<B: Backend>() {
    B::run(|| {
        let mut cache = one_layer::<B>(100, 8);
        for length in 1..=100 {
            append::<B>(&mut cache, 1);
            assert_eq!(cache.memory(), cache.config().estimate(length), "at {length}");
        }
        assert_eq!(cache.begin(&[100]).unwrap_err().status(), Status::Capacity);
        cache.clear(true).unwrap();
    });
}

pub fn one_step_at_a_time_and_every_layer<B: Backend>() {
    B::run(|| {
        let mut cache = ContiguousCache::<B::Store>::new(CacheConfig::uniform(2, 1, 4, 8)).unwrap();
        let rows = ones::<B>(1, 1, 4);
        let status = |result: etkv_core::Result<()>| result.unwrap_err().status();
        assert_eq!(status(cache.update_and_fetch(0, &rows, &rows).map(drop)), Status::Step);
        assert_eq!(status(cache.commit()), Status::Step);
        cache.begin(&[0]).unwrap();
        assert_eq!(status(cache.begin(&[0])), Status::Step);
        assert_eq!(status(cache.clear(false)), Status::Step);
        assert_eq!(status(cache.rewind(0)), Status::Step);
        cache.update_and_fetch(0, &rows, &rows).unwrap();
        cache.update_and_fetch(0, &rows, &rows).unwrap();
        let longer = ones::<B>(1, 2, 4);
        assert_eq!(status(cache.update_and_fetch(0, &longer, &rows).map(drop)), Status::Shape);
        assert_eq!(status(cache.update_and_fetch(0, &rows, &longer).map(drop)), Status::Shape);
        assert_eq!(status(cache.update_and_fetch(2, &rows, &rows).map(drop)), Status::Shape);
        assert_eq!(status(cache.commit()), Status::Step);
        let wide = ones::<B>(2, 1, 4);
        assert_eq!(status(cache.update_and_fetch(1, &wide, &rows).map(drop)), Status::Shape);
        cache.update_and_fetch(1, &rows, &rows).unwrap();
        cache.commit().unwrap();
        assert_eq!(cache.length(), 1);
    });
}

pub fn threads_may_take_turns<B: Backend>() {
    let cache = std::sync::Arc::new(std::sync::Mutex::new(one_layer::<B>(64, 8)));
    for _ in 0..10 {
        let cache = cache.clone();
        std::thread::spawn(move || B::run(|| append::<B>(&mut cache.lock().unwrap(), 3)))
            .join()
            .unwrap();
    }
    assert_eq!(cache.lock().unwrap().length(), 30);
}
