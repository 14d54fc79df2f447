//! Single sequences of caches in files. A sequence continues in another cache next to other sequences, which are
//! unchanged. Or it is refused, and nothing changes.

use std::slice::from_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

use etkv_core::{CacheConfig, KvFormat, LayerPolicy, Status};
use etkv_file::{load, load_sequence, save, save_sequence};

use super::driver::{forward, operate, AnyCache, Shape};
use super::{written, SaveFile, Written};
use crate::backend::Backend;
use crate::stores::{labels, MODEL};
use crate::{for_seeds, runs, Rng};

fn of_sequence<B: Backend>(cache: &mut AnyCache<B>, sequence: i32) -> Written {
    written(&mut *cache.saving_sequence(sequence).unwrap())
}

/// Returns the sequences without candidates.
fn whole<B: Backend>(cache: &AnyCache<B>) -> Vec<i32> {
    let tree = |sequence| cache.trees().map_or(0, |trees| trees.tree_len(sequence).unwrap());
    let all = cache.sequences().unwrap();
    let live = all.live_sequences().into_iter();
    live.filter(|&one| tree(one) == 0 && all.seq_len(one).unwrap() > 0).collect()
}

fn fit(found: [KvFormat; 2], here: [KvFormat; 2]) -> bool {
    found.iter().zip(here).all(|(a, b)| *a == b || (a.is_float() && b.is_float()))
}

/// A sequence of one generated cache is added to another generated cache.
pub fn a_sequence_joins_others_that_stay<B: Backend>() {
    let place = SaveFile::new();
    let [joined, refused] = [AtomicUsize::new(0), AtomicUsize::new(0)];
    let n_seeds = 300 / B::COST;
    for_seeds(n_seeds, |seed| {
        B::run(|| {
            let mut rng = Rng::new(seed);
            let mut shape = Shape::new(&mut rng);
            shape.kind = 1 + rng.below(2);
            let mut saved = shape.make::<B>();
            shape.kind = 1 + rng.below(2);
            let mut other = shape.make::<B>();
            for _ in 0..rng.below(25) {
                operate::<B>(&mut rng, from_mut(&mut saved));
            }
            for _ in 0..rng.below(25) {
                operate::<B>(&mut rng, from_mut(&mut other));
            }
            let Some(&sequence) = whole::<B>(&saved).first() else { return };
            let tokens = [i64::from(sequence), -1];
            save_sequence(&mut *saved, sequence, &place.path, labels(&tokens)).unwrap();
            let found = of_sequence::<B>(&mut saved, sequence);
            let n = saved.sequences().unwrap().seq_len(sequence).unwrap();

            let (formats, length) = (other.formats(), other.length());
            let neighbours = whole::<B>(&other);
            let before: Vec<_> =
                neighbours.iter().map(|&one| of_sequence::<B>(&mut other, one)).collect();
            let all = written(other.saving().unwrap());
            match load_sequence(&mut *other, 9, &place.path, MODEL) {
                Ok(read) => {
                    joined.fetch_add(1, Ordering::Relaxed);
                    assert_eq!(read, tokens);
                    assert_eq!(other.length(), length + n);
                    let face = other.sequences().unwrap();
                    let from = saved.sequences().unwrap();
                    assert_eq!(face.seq_positions(9), from.seq_positions(sequence));
                    assert_eq!(face.seq_rewindable_to(9), from.seq_rewindable_to(sequence));
                    if other.formats() == formats {
                        for (&one, before) in neighbours.iter().zip(&before) {
                            assert_eq!(of_sequence::<B>(&mut other, one), *before);
                        }
                    }
                    if other.formats() == saved.formats() {
                        assert_eq!(of_sequence::<B>(&mut other, 9).1, found.1);
                    }
                }
                Err(error) => {
                    refused.fetch_add(1, Ordering::Relaxed);
                    // Rows that waited for `quantized_kv_start` are converted.
                    let waits = saved.config().quantized_kv_start.is_some();
                    let fits = fit(saved.formats(), formats);
                    let expected = match error.status() {
                        // There is no room for the rows, or for rows in float that wait for their conversion.
                        Status::Capacity => {
                            (fits || waits) && length + n > other.capacity().min(12)
                        }
                        _ => error.message().contains("this cache stores them in") && !fits,
                    };
                    assert!(expected, "{n} beside {length}: {error}");
                    assert_eq!(written(other.saving().unwrap()), all);
                }
            }
            for _ in 0..10 {
                operate::<B>(&mut rng, from_mut(&mut other));
            }
        });
    });
    if std::env::var_os("ETKV_SEED").is_none() && runs(n_seeds) >= n_seeds {
        let [joined, refused] = [joined, refused].map(|n| n.into_inner() as u64);
        let enough = joined > n_seeds / 6 && refused > n_seeds / 60;
        assert!(enough, "{n_seeds} seeds: {joined} joined, {refused} refused");
    }
}

/// Runs the next `n` tokens of a sequence. Returns the bits of the rows that these tokens see.
fn go_on<B: Backend>(seed: u64, cache: &mut AnyCache<B>, sequence: i32, n: i32) -> Vec<u32> {
    let all = cache.sequences_mut().unwrap();
    let next = all.seq_next(sequence).unwrap();
    all.begin_step(&vec![sequence; n as usize]).unwrap();
    forward::<B>(&mut Rng::new(seed), cache, &(next..next + n).collect::<Vec<_>>()).unwrap()
}

fn windowed() -> CacheConfig {
    let mut config = CacheConfig::uniform(2, 2, 64, 200).stored_as(KvFormat::F32);
    config.max_step_tokens = 12;
    config.layers[1].policy = LayerPolicy::Window { window: 8, sinks: 2 };
    config
}

/// Checks that both results have the same bits, or almost the same values.
fn check_alike(found: &[u32], expected: &[u32], same_bits: bool) {
    let near = |(&a, &b): (&u32, &u32)| {
        a == b || !same_bits && (f32::from_bits(a) - f32::from_bits(b)).abs() < 1e-4
    };
    let all = found.iter().zip(expected).all(near);
    assert!(found.len() == expected.len() && all, "other values");
}

/// Later results are equal in three caches: one has the sequence under another number, one has it alone, and one has
/// loaded it from a cache that had no other. Rows of a window may be in another order, in which values are summed.
pub fn a_sequence_goes_on_alike<B: Backend>() {
    let place = SaveFile::new();
    let full = CacheConfig::uniform(2, 2, 64, 200);
    B::run(|| {
        for (config, format, same_bits) in [
            (full.clone(), "f32", true),
            (full.clone(), "bf16", true),
            (full.clone(), "affine8g32", true),
            (full, "mxfp4", true),
            (windowed(), "f32", false),
            (windowed(), "affine8g32", false),
        ] {
            let config = config.stored_as(format.parse().unwrap());
            let shape = |kind| Shape { kind, config: config.clone() };
            let mut saved = shape(1).make::<B>();
            for sequence in 0..3 {
                for step in 0..4 {
                    go_on::<B>(10 * sequence + step, &mut saved, sequence as i32, 10);
                }
            }
            save_sequence(&mut *saved, 1, &place.path, labels(&[5])).unwrap();
            let mut other = shape(2).make::<B>();
            go_on::<B>(99, &mut other, 0, 7);
            go_on::<B>(98, &mut other, 200, 7);
            assert_eq!(load_sequence(&mut *other, 100, &place.path, MODEL).unwrap(), [5]);
            // A file of one sequence can also be loaded as a cache.
            let mut alone = shape(1).make::<B>();
            load(&mut *alone, &place.path, MODEL).unwrap();
            for seed in 0..5 {
                let expected = go_on::<B>(seed, &mut saved, 1, 3);
                check_alike(&go_on::<B>(seed, &mut other, 100, 3), &expected, same_bits);
                check_alike(&go_on::<B>(seed, &mut alone, 0, 3), &expected, same_bits);
            }

            // The sequence of a contiguous cache can also be added to others.
            let mut growing = shape(0).make::<B>();
            let mut same = shape(1).make::<B>();
            for seed in 0..4i32 {
                let at: Vec<i32> = (seed * 10..seed * 10 + 10).collect();
                forward::<B>(&mut Rng::new(seed as u64), &mut growing, &at).unwrap();
                go_on::<B>(seed as u64, &mut same, 4, 10);
            }
            save(&mut *growing, &place.path, labels(&[])).unwrap();
            load_sequence(&mut *other, 7, &place.path, MODEL).unwrap();
            for seed in 0..5 {
                let expected = go_on::<B>(seed, &mut same, 4, 3);
                check_alike(&go_on::<B>(seed, &mut other, 7, 3), &expected, same_bits);
            }
        }
    });
}

pub fn a_sequence_that_does_not_fit_is_refused<B: Backend>() {
    let place = SaveFile::new();
    B::run(|| {
        let mut saved = Shape { kind: 2, config: windowed() }.make::<B>();
        go_on::<B>(1, &mut saved, 3, 10);
        save_sequence(&mut *saved, 3, &place.path, labels(&[])).unwrap();
        let into = |kind, config: CacheConfig, sequence, status, words: &str| {
            let mut cache = Shape { kind, config }.make::<B>();
            if kind > 0 {
                go_on::<B>(2, &mut cache, 5, 6);
            }
            let before = written(cache.saving().unwrap());
            let error = load_sequence(&mut *cache, sequence, &place.path, MODEL).unwrap_err();
            assert_eq!(error.status(), status, "{error}");
            assert!(error.message().contains(words), "{error}: expected {words}");
            assert_eq!(written(cache.saving().unwrap()), before);
        };
        let config = windowed();
        into(1, config.clone(), 256, Status::InvalidArgument, "from 0 to 255, got 256");
        into(1, config.clone(), 5, Status::InvalidArgument, "sequence 5 holds 6 positions");
        into(0, config.clone(), 0, Status::Unsupported, "kind `contiguous`");
        let small = CacheConfig::uniform(2, 2, 64, 15).stored_as(KvFormat::F32);
        into(1, small.clone(), 0, Status::File, "a window of 8 and 2 sinks in the file");
        let quantized = config.clone().stored_as("affine8g32".parse().unwrap());
        into(
            1,
            quantized,
            0,
            Status::File,
            "keys in f32, but this cache stores them in affine8g32",
        );

        let mut full =
            Shape { kind: 1, config: CacheConfig::uniform(2, 2, 64, 40).stored_as(KvFormat::F32) }
                .make::<B>();
        go_on::<B>(1, &mut full, 3, 10);
        save_sequence(&mut *full, 3, &place.path, labels(&[])).unwrap();
        let mut tight = Shape { kind: 1, config: small }.make::<B>();
        go_on::<B>(2, &mut tight, 5, 6);
        let error = load_sequence(&mut *tight, 0, &place.path, MODEL).unwrap_err();
        assert_eq!(error.status(), Status::Capacity, "{error}");
        assert!(error.message().contains("needs 10 cells, but 9 of 15 are free"), "{error}");

        go_on::<B>(3, &mut full, 4, 2);
        save(&mut *full, &place.path, labels(&[])).unwrap();
        let error = load_sequence(&mut *full, 0, &place.path, MODEL).unwrap_err();
        assert!(error.message().contains("expected a file with 1 sequence, got 2"), "{error}");

        let refused = |cache: &mut AnyCache<B>, sequence, words: &str| {
            let error =
                save_sequence(&mut **cache, sequence, &place.path, labels(&[])).unwrap_err();
            assert_eq!(error.status(), Status::InvalidArgument, "{error}");
            assert!(error.message().contains(words), "{error}: expected {words}");
        };
        refused(&mut saved, -1, "got -1");
        refused(&mut saved, 4, "sequence 4 holds no positions; the cache has [3]");
        saved.trees_mut().unwrap().propose(3, &[-1, 0]).unwrap();
        refused(&mut saved, 3, "sequence 3 carries 2 candidates");
        saved.begin(&[10, 11]).unwrap();
        let error = save_sequence(&mut *saved, 3, &place.path, labels(&[])).unwrap_err();
        assert_eq!(error.status(), Status::Step, "{error}");
        saved.abort();
    });
}

/// A contiguous cache may have values that are not finite, because no other sequence reads them. In shared cells, other
/// sequences would read them.
pub fn a_sequence_that_is_not_finite_joins_no_others<B: Backend>() {
    let place = SaveFile::new();
    for in_keys in [false, true] {
        let mut config = CacheConfig::uniform(1, 1, 64, 40).stored_as(KvFormat::F32);
        config.layers[0].values_in_keys = in_keys;
        B::run(|| not_finite::<B>(&config, &place));
    }
}

fn not_finite<B: Backend>(config: &CacheConfig, place: &SaveFile) {
    // Values that are in keys are not read from the second tensor.
    let in_keys = config.layers[0].values_in_keys;
    let write = |cache: &mut AnyCache<B>, value: f32| {
        let rows = |value| B::tensor(&vec![vec![vec![value; 64]]; 2]);
        let [k, v] = if in_keys { [value, f32::NAN] } else { [0.5, value] };
        let mut step = etkv_core::Step::begin(&mut **cache, &[0, 1]).unwrap();
        step.update_and_fetch(0, &rows(k), &rows(v)).unwrap();
        step.commit(&[]).unwrap();
    };
    for (value, to, fits) in [
        (f32::NAN, "f32", false),
        (1e30, "f32", true),
        // This value is infinite after its conversion.
        (1e30, "f16", false),
    ] {
        let mut growing = Shape { kind: 0, config: config.clone() }.make::<B>();
        write(&mut growing, value);
        save(&mut *growing, &place.path, labels(&[])).unwrap();
        let to: KvFormat = to.parse().unwrap();
        let mut pool = Shape { kind: 1, config: config.clone().stored_as(to) }.make::<B>();
        go_on::<B>(1, &mut pool, 0, 4);
        let loaded = load_sequence(&mut *pool, 1, &place.path, MODEL);
        assert_eq!(loaded.is_ok(), fits, "{value} in {to}");
        if let Err(error) = loaded {
            assert_eq!(error.status(), Status::File);
            assert!(error.message().contains("a value of layer 0 is not finite"), "{error}");
            assert_eq!(pool.length(), 4);
        }
        assert!(go_on::<B>(2, &mut pool, 0, 1)
            .iter()
            .all(|&bits| f32::from_bits(bits).is_finite()));
    }
    // The same holds for a file of all sequences.
    let mut wide = Shape { kind: 1, config: config.clone() }.make::<B>();
    write(&mut wide, 1e30);
    save(&mut *wide, &place.path, labels(&[])).unwrap();
    load(&mut *wide, &place.path, MODEL).unwrap();
    let mut narrow = Shape { kind: 1, config: config.clone().stored_as(KvFormat::F16) }.make::<B>();
    let error = load(&mut *narrow, &place.path, MODEL).unwrap_err();
    assert_eq!((error.status(), narrow.length()), (Status::File, 0));
    assert!(error.message().contains("a value of layer 0 is not finite"), "{error}");
}
