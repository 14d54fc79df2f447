//! A program writes rows into the buffers itself, in a step that is then rolled back. The cache must have the same
//! bits as before the step.

use etkv_core::bookkeeping::Slots;
use etkv_core::{AttendCache, Cache, CacheConfig, Growth, SeqCache};
use mlx_rs::Array;

use crate::backend::{CellsCache, ContiguousCache, MlxCache, Step};
use crate::mlx;
use crate::store::tests::{rows, values};
use crate::{KvFormat, MlxStore, Result};

const LAYERS: usize = 2;
const HEADS: i32 = 3;
const DIM: i32 = 16;

/// A cache whose buffers begin with 4 slots.
fn cache(format: KvFormat) -> ContiguousCache {
    ContiguousCache::new(config(format)).unwrap()
}

fn config(format: KvFormat) -> CacheConfig {
    let growth = Growth::Doubling { first: 4 };
    let config = CacheConfig::uniform(LAYERS, HEADS, DIM, 32);
    CacheConfig { growth, ..config.stored_as(format) }
}

/// Returns the buffers of a layer's keys and values.
fn buffers(store: Option<&MlxStore>, layer: usize) -> [&Array; 2] {
    store.unwrap().planes(layer).unwrap().map(|(_, buffers)| buffers[0])
}

/// Runs a step through MLX, and commits it.
fn run(cache: &mut MlxCache, positions: &[i32], seed: u64) {
    let new = |layer| rows(seed + layer as u64, HEADS, positions.len() as i32, DIM);
    mlx::run(|| {
        let mut step = Step::begin(cache, positions)?;
        for layer in 0..LAYERS {
            step.update_and_fetch(layer, &new(layer), &new(layer + 10))?;
        }
        Ok(step.commit(&[])?)
    })
    .unwrap();
}

/// Opens a step, places its rows and overwrites them with `byte`, like a kernel that runs outside of MLX. Commits the
/// step if requested.
fn place(cache: &mut MlxCache, positions: &[i32], byte: u8, commit: bool) {
    let mut step = Step::begin(cache, positions).unwrap();
    for layer in 0..LAYERS {
        let placed = step.place(layer).unwrap().unwrap();
        let Slots::Run(slots) = placed.write else { panic!("{placed:?}") };
        for buffer in buffers(step.store(), layer) {
            let &[1, heads, n_slots, dim] = buffer.shape() else { panic!("{:?}", buffer.shape()) };
            assert_eq!((heads, dim), (HEADS, DIM));
            let row = buffer.nbytes() / (heads * n_slots) as usize;
            // SAFETY: the buffer is computed and row-major, which the index assumes; no other thread uses it.
            unsafe {
                let data = mlx_sys::mlx_array_data_uint8(buffer.as_ptr()).cast_mut();
                for head in 0..heads {
                    let from = data.add((head * n_slots + slots.start) as usize * row);
                    from.write_bytes(byte, slots.len() * row);
                }
            }
            let written = mlx::slice_axis(buffer, 2, slots.start, slots.end, 1);
            let written = mlx::run(|| super::bytes_of(&written?)).unwrap();
            assert!(written.iter().all(|&one| one == byte), "the rows are where MLX reads them");
        }
    }
    if commit {
        step.commit(&[]).unwrap();
    }
}

/// Returns the bits of the first `n` rows of each head of all layers.
fn bits(cache: &mut MlxCache, n: i32) -> Vec<u8> {
    let of_buffer = |buffer: &Array| -> Result<Vec<u8>> {
        super::bytes_of(&mlx::slice_axis(buffer, 2, 0, n, 1)?)
    };
    let buffers = (0..LAYERS).flat_map(|layer| buffers(cache.store(), layer));
    mlx::run(|| Ok(buffers.map(of_buffer).collect::<Result<Vec<_>>>()?.concat())).unwrap()
}

/// Checks that the first `length` rows are still `before`, and that later steps through MLX work.
fn goes_on(cache: &mut ContiguousCache, length: i32, before: &[u8], what: &str) {
    run(cache, &[length], 77);
    assert_eq!(cache.length(), length + 1);
    assert_eq!(bits(cache, length), before, "{what}: after a further step");
    let expected = rows(77, HEADS, 1, DIM);
    let [keys, _] = buffers(cache.store(), 0);
    let (found, expected) = mlx::run(|| {
        Ok((values(&mlx::slice_axis(keys, 2, length, length + 1, 1)?)?, values(&expected)?))
    })
    .unwrap();
    let error = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(error < 0.02, "{what}: {error}");
}

const FORMATS: [KvFormat; 3] = [KvFormat::F32, KvFormat::F16, KvFormat::Bf16];

/// Returns whether MLX runs on the CPU: the host cannot write into a GPU's memory as a kernel does.
fn is_on_cpu() -> bool {
    !mlx::on_gpu().unwrap()
}

/// A CUDA graph keeps the addresses of buffers while the epoch of MLX is the same.
#[test]
fn only_steps_that_move_buffers_end_the_epoch_of_mlx() {
    let data = |cache: &ContiguousCache| {
        let [keys, _] = buffers(cache.store(), 0);
        // SAFETY: the handle is live, and nothing is read.
        unsafe { mlx_sys::mlx_array_data_uint8(keys.as_ptr()) }
    };
    let mut cache = cache(KvFormat::F32);
    run(&mut cache, &[0, 1], 1);
    // Other tests do not run in MLX while this thread holds it.
    let mlx = mlx::enter().unwrap();
    for position in 2..12 {
        let before = (mlx::epoch(&mlx), data(&cache));
        let mut step = Step::begin(&mut cache, &[position]).unwrap();
        for layer in 0..LAYERS {
            step.place(layer).unwrap().unwrap();
        }
        step.commit(&[]).unwrap();
        let grows = [4, 8].contains(&position);
        assert_eq!(mlx::epoch(&mlx) != before.0, grows, "position {position}");
        assert_eq!(data(&cache) != before.1, grows, "position {position}");
    }
    let changes: [fn(&mut ContiguousCache); 3] = [
        |cache| run(cache, &[12], 2),
        |cache| cache.convert(KvFormat::F16, KvFormat::F16).unwrap(),
        |cache| cache.clear(true).unwrap(),
    ];
    for change in changes {
        let before = mlx::epoch(&mlx);
        change(&mut cache);
        assert_ne!(mlx::epoch(&mlx), before);
    }
    let other = self::cache(KvFormat::F32);
    assert_ne!(cache.store().unwrap().id(), other.store().unwrap().id());
}

/// The step begins after the rewind. The rows that were rewound are gone, and the rows before them stay.
#[test]
fn a_step_after_a_rewind_keeps_earlier_rows() {
    for format in FORMATS.into_iter().filter(|_| is_on_cpu()) {
        let mut cache = cache(format);
        run(&mut cache, &[0, 1, 2, 3, 4, 5], 1);
        let before = bits(&mut cache, 4);
        cache.rewind(4).unwrap();
        place(&mut cache, &[4, 5, 6], 0xa5, false);
        assert_eq!(cache.length(), 4);
        assert_eq!(bits(&mut cache, 4), before, "{format}");
        goes_on(&mut cache, 4, &before, "rewound");
    }
}

/// The step itself rewinds: a rollback restores the rows that it overwrote.
#[test]
fn a_step_that_rewinds_restores_the_rows_that_it_overwrote() {
    for format in FORMATS.into_iter().filter(|_| is_on_cpu()) {
        for positions in [&[3, 4, 5, 6, 7][..], &[5], &[0, 1], &[0, 1, 2, 3, 4, 5, 6, 7, 8]] {
            let mut cache = cache(format);
            run(&mut cache, &[0, 1, 2, 3, 4, 5], 2);
            let before = bits(&mut cache, 6);
            place(&mut cache, positions, 0xa5, false);
            assert_eq!(cache.length(), 6, "{format} {positions:?}");
            assert_eq!(bits(&mut cache, 6), before, "{format} {positions:?}");
            goes_on(&mut cache, 6, &before, "overwritten");
        }
    }
}

/// The step grows the buffers, which replaces them. The rows before the step were written by MLX or placed.
#[test]
fn a_step_that_grows_keeps_earlier_rows() {
    for format in FORMATS.into_iter().filter(|_| is_on_cpu()) {
        for placed_before in [false, true] {
            let mut cache = cache(format);
            run(&mut cache, &[0, 1], 3);
            if placed_before {
                place(&mut cache, &[2], 0x3c, true);
            } else {
                run(&mut cache, &[2], 4);
            }
            let before = bits(&mut cache, 3);
            let allocated = cache.memory().allocated;
            place(&mut cache, &[3, 4, 5, 6, 7, 8], 0xa5, false);
            assert!(cache.memory().allocated > allocated, "the buffers have grown");
            assert_eq!(cache.length(), 3);
            assert_eq!(bits(&mut cache, 3), before, "{format}, placed: {placed_before}");
            goes_on(&mut cache, 3, &before, "grown");
        }
    }
}

/// Sequences that share cells also read each other's values, with a weight of 0. Since 0 times NaN is NaN, the
/// rollback zeroes these values. The declared step remains, and the interpreter runs it again.
#[test]
fn a_step_of_several_sequences_leaves_zeros_and_runs_again() {
    for format in FORMATS.into_iter().filter(|_| is_on_cpu()) {
        let mut cells = CellsCache::new(config(format)).unwrap();
        cells.begin_step(&[0; 3]).unwrap();
        run(&mut cells, &[0, 1, 2], 5);
        let before = bits(&mut cells, 3);
        cells.begin_step(&[1, 0]).unwrap();
        place(&mut cells, &[0, 3], 0xff, false);
        assert_eq!((cells.length(), bits(&mut cells, 3)), (3, before.clone()), "{format}");
        // The last two rows of each head belong to the step.
        let rows = bits(&mut cells, 5);
        let buffer = rows.len() / (2 * LAYERS);
        for values in rows.chunks_exact(buffer).skip(1).step_by(2) {
            for head in values.chunks_exact(buffer / HEADS as usize) {
                let of_step = &head[head.len() / 5 * 3..];
                assert!(of_step.iter().all(|&byte| byte == 0), "{format}: {of_step:?}");
            }
        }
        run(&mut cells, &[0, 3], 6);
        assert_eq!((cells.seq_len(0), cells.seq_len(1)), (Ok(4), Ok(1)));
        assert_eq!(bits(&mut cells, 3), before, "{format}");
    }
}
