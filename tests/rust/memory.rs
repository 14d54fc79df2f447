//! The MLX memory that steps, forks and clears use.
//!
//! MLX counts the memory of the whole process, so each test holds `mlx::run` throughout.

use std::time::Duration;

use etkv::{
    Cache, CacheConfig, CellsCache, ContiguousCache, Growth, KvFormat, LayerConfig, LayerPolicy,
    MlxCache, Status, Step,
};
use mlx_rs::memory::{active_memory, clear_cache, peak_memory, reset_peak_memory};
use mlx_rs::{Array, Dtype};

const N_HEADS: i32 = 4;
const N_KV_HEADS: i32 = 2;
const HEAD_DIM: i32 = 64;

fn config(format: KvFormat, capacity: i32, policies: &[LayerPolicy]) -> CacheConfig {
    let layer = |&policy: &LayerPolicy| LayerConfig {
        n_kv_heads: N_KV_HEADS,
        k_head_dim: HEAD_DIM,
        v_head_dim: HEAD_DIM,
        policy,
        values_in_keys: false,
    };
    CacheConfig {
        layers: policies.iter().map(layer).collect(),
        growth: Growth::Upfront,
        max_step_tokens: 512,
        ..CacheConfig::uniform(1, 1, 1, capacity).stored_as(format)
    }
}

/// Runs one forward of a program whose layers all have the same keys and queries.
fn step(cache: &mut MlxCache, positions: &[i32], dtype: Dtype) {
    let n = positions.len() as i32;
    let ones =
        |heads| Array::ones::<f32>(&[1, heads, n, HEAD_DIM]).unwrap().as_dtype(dtype).unwrap();
    let (rows, mut x) = (ones(N_KV_HEADS), ones(N_HEADS));
    let n_layers = cache.config().layers.len();
    let mut step = Step::begin(cache, positions).unwrap();
    for layer in 0..n_layers {
        let spec = step.update_and_fetch(layer, &rows, &rows).unwrap();
        // Each layer depends on the previous one, as in a program.
        x = etkv::attend(&x, &spec, 0.1, None).unwrap();
    }
    step.commit(&[&x]).unwrap();
}

/// Appends rows without attending to them.
fn fill(cache: &mut MlxCache, length: i32, dtype: Dtype) {
    for start in (0..length).step_by(512) {
        let positions: Vec<i32> = (start..(start + 512).min(length)).collect();
        let shape = [1, N_KV_HEADS, positions.len() as i32, HEAD_DIM];
        let rows = Array::ones::<f32>(&shape).unwrap().as_dtype(dtype).unwrap();
        let n_layers = cache.config().layers.len();
        let mut step = Step::begin(cache, &positions).unwrap();
        for layer in 0..n_layers {
            step.update_and_fetch(layer, &rows, &rows).unwrap();
        }
        step.commit(&[]).unwrap();
    }
}

/// Returns active memory in bytes. A GPU frees buffers some time after their last use, so this waits until the number
/// is stable.
fn active() -> i64 {
    let now = || active_memory().unwrap() as i64;
    if !etkv::mlx::on_gpu().unwrap() {
        return now();
    }
    let mut last = now();
    let mut same = 0;
    while same < 20 {
        std::thread::sleep(Duration::from_micros(100));
        same = if now() == last { same + 1 } else { 0 };
        last = now();
    }
    last
}

/// Returns the numbers of bytes by which `steps` decode steps raise active memory and its peak.
fn raised(cache: &mut MlxCache, steps: i32, dtype: Dtype) -> (i64, i64) {
    let length = cache.length();
    (length..length + 8).for_each(|position| step(cache, &[position], dtype));
    clear_cache().unwrap();
    let before = active();
    reset_peak_memory().unwrap();
    for position in length + 8..length + 8 + steps {
        step(cache, &[position], dtype);
        // Waits, because otherwise the peak would include several steps.
        active();
    }
    (active() - before, peak_memory().unwrap() as i64 - before)
}

type New = fn(CacheConfig) -> Box<MlxCache>;

const LENGTH: i32 = 32_768;
/// The number of elements of one layer's keys. A copy of them would be visible.
const LAYER_ELEMENTS: i64 = LENGTH as i64 * (N_KV_HEADS * HEAD_DIM) as i64;

#[test]
fn decoding_copies_no_history() {
    let kinds: [(&str, New); 3] = [
        ("contiguous", |config| Box::new(ContiguousCache::new(config).unwrap())),
        ("seq", |config| Box::new(CellsCache::new(config).unwrap())),
        ("tree", |config| Box::new(CellsCache::with_trees(config).unwrap())),
    ];
    etkv::mlx::run(|| {
        for (kind, new) in kinds {
            for (format, dtype) in
                [(KvFormat::F32, Dtype::Float32), (KvFormat::F16, Dtype::Float16)]
            {
                let mut cache = new(config(format, LENGTH + 2000, &[LayerPolicy::Full; 2]));
                fill(&mut *cache, LENGTH, dtype);
                let many = kind == "contiguous" && format == KvFormat::F32;
                let steps = if many { etkv_tests::runs(30) as i32 } else { 16 };
                let (active, peak) = raised(&mut *cache, steps, dtype);
                assert_eq!(active, 0, "{kind} {format}: decoding leaks memory");
                // The scores of one layer, and their softmax.
                let scores = i64::from(N_HEADS * (LENGTH + 2000)) * 4;
                println!("{kind} {format}: a step needs {peak} bytes, scores are {scores}");
                assert!(peak < 4 * scores, "{kind} {format}: a decode step needs {peak} bytes");
                assert!(4 * scores < LAYER_ELEMENTS * format.row_bytes(64) as i64 / 64);
            }
        }
        Ok(())
    })
    .unwrap();
}

/// Packed rows are multiplied in their stored format. Rows of another dtype than the queries are multiplied in
/// blocks.
#[test]
fn decoding_unpacks_no_history() {
    let formats = [
        "f16",
        "bf16",
        "affine8g64",
        "affine6g32",
        "affine4g32",
        "affine3g64",
        "affine2g32",
        "mxfp8",
        "mxfp4",
        "nvfp4",
        "row-int4",
        "row-fp4",
    ];
    etkv::mlx::run(|| {
        for name in formats {
            let format: KvFormat = name.parse()?;
            let mut cache =
                ContiguousCache::new(config(format, LENGTH + 64, &[LayerPolicy::Full; 2]))?;
            fill(&mut cache, LENGTH, Dtype::Float32);
            let (active, peak) = raised(&mut cache, 8, Dtype::Float32);
            println!("{name}: a step needs {peak} bytes, unpacked keys {}", 4 * LAYER_ELEMENTS);
            assert_eq!(active, 0, "{name}: decoding leaks memory");
            // Some formats are unpacked in blocks of a constant size.
            let in_blocks = ["f16", "bf16", "mxfp8"].contains(&name);
            let block = if etkv::mlx::on_gpu()? { 32 << 20 } else { 4 << 20 };
            // A GPU frees the buffers of one layer after the next layer has begun.
            let share = if etkv::mlx::on_gpu()? { 2 * LAYER_ELEMENTS } else { LAYER_ELEMENTS };
            let bound = if in_blocks { 7 * block / 2 } else { 4 * share / 3 };
            assert!(peak < bound, "{name}: a decode step needs {peak} bytes");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn windows_slide_without_growing() {
    let window = LayerPolicy::Window { window: 1024, sinks: 0 };
    let sinks = LayerPolicy::Window { window: 1024, sinks: 4 };
    etkv::mlx::run(|| {
        let config = CacheConfig {
            growth: Growth::default(),
            ..config(KvFormat::F32, 40_000, &[window, sinks, window])
        };
        let mut caches: [Box<MlxCache>; 2] = [
            Box::new(ContiguousCache::new(config.clone()).unwrap()),
            Box::new(CellsCache::new(config.clone()).unwrap()),
        ];
        for cache in &mut caches {
            fill(&mut **cache, 8192, Dtype::Float32);
            let (active, peak) = raised(&mut **cache, 1200, Dtype::Float32);
            assert_eq!(active, 0, "{}: sliding leaks memory", cache.kind());
            // The bytes of the rows of one buffer, which move to the first slots.
            let moved = 4 * i64::from((1023 + 512 + 4) * N_KV_HEADS * HEAD_DIM);
            // A GPU moves the rows of all six buffers before it frees the first.
            let buffers = if etkv::mlx::on_gpu()? { 12 } else { 2 };
            assert!(peak < buffers * moved, "{}: sliding needs {peak} bytes", cache.kind());
            assert_eq!(cache.memory().allocated, config.estimate(9400).allocated);
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn forks_and_removals_move_no_bytes() {
    etkv::mlx::run(|| {
        let mut cache = CellsCache::new(config(KvFormat::F16, 4096, &[LayerPolicy::Full])).unwrap();
        fill(&mut cache, 2048, Dtype::Float16);
        let held = cache.memory();
        clear_cache()?;
        let before = active();
        reset_peak_memory()?;
        let sequences = cache.sequences_mut().unwrap();
        for branch in 1..=64 {
            sequences.seq_cp(0, branch, 0..i32::MAX)?;
        }
        (1..=32).for_each(|branch| sequences.seq_rm(branch, 0..i32::MAX).unwrap());
        assert_eq!(active(), before);
        // Nothing was allocated since the reset.
        assert!(peak_memory()? as i64 <= before);
        assert_eq!(cache.memory(), held, "branches count once");
        Ok(())
    })
    .unwrap();
}

#[test]
fn clearing_and_dropping_give_the_buffers_back() {
    etkv::mlx::run(|| {
        clear_cache()?;
        let before = active();
        let mut cache = CellsCache::with_trees(config(
            KvFormat::F32,
            4096,
            &[LayerPolicy::Full, LayerPolicy::Window { window: 64, sinks: 1 }],
        ))?;
        fill(&mut cache, 1024, Dtype::Float32);
        let held = cache.memory().allocated;
        assert_eq!(active() - before, held as i64);
        cache.clear(true)?;
        assert_eq!((active(), cache.memory().allocated), (before, 0));
        fill(&mut cache, 1024, Dtype::Float32);
        assert_eq!(cache.memory().allocated, held);
        drop(cache);
        assert_eq!(active(), before);
        Ok(())
    })
    .unwrap();
}

/// Without the check of sizes, MLX's CPU build would end the process if the system has too little memory.
#[test]
fn memory_that_there_is_not_is_an_error() {
    let config =
        CacheConfig { growth: Growth::Upfront, ..CacheConfig::uniform(1, 8, 128, 1 << 30) };
    if etkv::mlx::on_gpu().unwrap() {
        return;
    }
    let error = ContiguousCache::new(config).err().expect("2 TB cannot be allocated");
    assert_eq!(error.status(), Status::Backend);
    assert!(error.message().contains("out of memory"), "{error}");
}
