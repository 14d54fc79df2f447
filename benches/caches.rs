//! Measures caches with their tensors: a decode step with each kind and each format, and the calls that move rows.

use std::time::{Duration, Instant};

use etkv::{Cache, CacheConfig, CellsCache, ContiguousCache, Growth, KvFormat, MlxCache, Step};
use etkv_benches::{table, time_of};
use mlx_rs::Array;

const N_HEADS: i32 = 8;
const N_KV_HEADS: i32 = 2;
const HEAD_DIM: i32 = 64;
const N_LAYERS: usize = 4;
const CAPACITY: i32 = 40_000;
const LENGTHS: [i32; 4] = [256, 1024, 4096, 16_384];

fn config(format: &str) -> CacheConfig {
    let format: KvFormat = format.parse().expect("a format");
    CacheConfig {
        growth: Growth::Upfront,
        ..CacheConfig::uniform(N_LAYERS, N_KV_HEADS, HEAD_DIM, CAPACITY).stored_as(format)
    }
}

fn ones(heads: i32, n: i32) -> Array {
    Array::ones::<f32>(&[1, heads, n, HEAD_DIM]).expect("an array")
}

/// Runs a step of `n` tokens through all layers. Omits attention if only moves of rows are measured.
fn step(cache: &mut MlxCache, first: i32, n: i32, attends: bool) {
    let positions: Vec<i32> = (first..first + n).collect();
    let (rows, mut x) = (ones(N_KV_HEADS, n), ones(N_HEADS, n));
    let mut step = Step::begin(cache, &positions).expect("a step");
    for layer in 0..N_LAYERS {
        let spec = step.update_and_fetch(layer, &rows, &rows).expect("a layer");
        if attends {
            x = etkv::attend(&x, &spec, 0.1, None).expect("attention");
        }
    }
    step.commit(&[&x]).expect("a step");
}

fn filled(mut cache: Box<MlxCache>, length: i32) -> Box<MlxCache> {
    (0..length).step_by(256).for_each(|at| step(&mut *cache, at, 256.min(length - at), false));
    cache
}

/// Returns the mean time of a decode step after `length` tokens.
fn decode(cache: Box<MlxCache>, length: i32) -> Duration {
    const STEPS: u32 = 12;
    let mut cache = filled(cache, length);
    step(&mut *cache, length, 1, true);
    let start = Instant::now();
    (1..=STEPS as i32).for_each(|n| step(&mut *cache, length + n, 1, true));
    start.elapsed() / STEPS
}

fn contiguous(format: &str) -> Box<MlxCache> {
    Box::new(ContiguousCache::new(config(format)).expect("a cache"))
}

fn main() {
    let measured = etkv::mlx::run(|| {
        table(
            "A decode step of 4 layers, 8 query and 2 KV heads of 64, float32: one sequence",
            &LENGTHS,
            &mut [
                ("contiguous", Box::new(|n| decode(contiguous("f32"), n))),
                (
                    "seq",
                    Box::new(|n| {
                        decode(Box::new(CellsCache::new(config("f32")).expect("a cache")), n)
                    }),
                ),
                (
                    "tree",
                    Box::new(|n| {
                        decode(Box::new(CellsCache::with_trees(config("f32")).expect("a cache")), n)
                    }),
                ),
            ],
        );
        table(
            "The same by format, through the contiguous cache",
            &LENGTHS,
            &mut ["f32", "f16", "affine8g64", "affine4g64", "mxfp8", "mxfp4", "nvfp4", "row-int4"]
                .map(|format| -> etkv_benches::Case {
                    (format, Box::new(move |n| decode(contiguous(format), n)))
                }),
        );
        table(
            "Between steps, float32",
            &LENGTHS,
            &mut [
                (
                    "fork to 64, and back",
                    Box::new(|n| {
                        let mut cache = CellsCache::new(config("f32")).expect("a cache");
                        (0..n).step_by(256).for_each(|at| step(&mut cache, at, 256, false));
                        let sequences = cache.sequences_mut().expect("sequences");
                        time_of(|| {
                            for branch in 1..=64 {
                                sequences.seq_cp(0, branch, 0..i32::MAX).expect("a fork");
                            }
                            sequences.seq_keep(0).expect("a removal");
                        })
                    }),
                ),
                ("compact a hole of 16", Box::new(compaction)),
            ],
        );
        Ok(())
    });
    measured.expect("MLX");
}

fn compaction(n: i32) -> Duration {
    let mut cache = CellsCache::new(config("f32")).expect("a cache");
    (0..n).step_by(256).for_each(|at| step(&mut cache, at, 256, false));
    let sequences = cache.sequences_mut().expect("sequences");
    sequences.seq_rm(0, 32..48).expect("a removal");
    let start = Instant::now();
    sequences.compact().expect("compaction");
    start.elapsed()
}
