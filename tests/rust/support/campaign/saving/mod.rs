//! Caches that were saved and loaded continue like caches that were not, and damaged files are refused.
//!
//! A failure prints its seed; `ETKV_SEED=<seed>` runs only that seed, `ETKV_RUNS=<n>` runs `n` seeds.

mod damage;
pub mod driver;
mod sequences;

use std::path::PathBuf;

use etkv_core::{CacheConfig, KvFormat, LayerPolicy, SaveCache, Snapshot, Status};
use etkv_file::{load, save};

use crate::backend::Backend;
use crate::stores::{labels, MODEL};
use crate::{for_seeds, Rng};
pub use damage::damaged_files_are_refused_and_change_nothing;
use driver::{operate, AnyCache, Shape};
pub use sequences::{
    a_sequence_goes_on_alike, a_sequence_joins_others_that_stay,
    a_sequence_that_does_not_fit_is_refused, a_sequence_that_is_not_finite_joins_no_others,
};

/// A folder that is removed on drop, and a file in it.
struct SaveFile {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

impl SaveFile {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a cache.safetensors");
        Self { _folder: folder, path }
    }
}

/// The integers and rows that a face saves.
pub type Written = (Snapshot, Vec<u8>);

/// Returns what a face saves.
pub fn written(face: &mut dyn SaveCache) -> Written {
    let snapshot = face.snapshot().unwrap();
    let mut all = Vec::new();
    face.read_rows(&snapshot, &mut |_, bytes| {
        all.extend_from_slice(bytes);
        Ok(())
    })
    .unwrap();
    (snapshot, all)
}

pub fn loaded_caches_continue_like_saved_ones<B: Backend>() {
    let place = SaveFile::new();
    for_seeds(60 / B::COST, |seed| {
        B::run(|| {
            let mut rng = Rng::new(seed);
            let shape = Shape::new(&mut rng);
            let mut caches: Vec<AnyCache<B>> = vec![shape.make::<B>()];
            for round in 0..3i64 {
                for _ in 0..rng.below(15) {
                    operate::<B>(&mut rng, &mut caches);
                }
                let tokens = [round, -1, i64::MAX];
                save(&mut *caches[0], &place.path, labels(&tokens)).unwrap();
                // Loads into a new cache, or into a cache whose contents are replaced.
                if caches.len() < 3 {
                    caches.push(shape.make::<B>());
                }
                for cache in &mut caches[1..] {
                    assert_eq!(load(&mut **cache, &place.path, MODEL).unwrap(), tokens);
                }
                for _ in 0..10 {
                    operate::<B>(&mut rng, &mut caches);
                }
            }
        });
    });
}

/// A cache of one backend loads a file of another backend's cache, and saves the same bytes.
pub fn files_cross_backends<A: Backend, B: Backend>() {
    let place = SaveFile::new();
    for_seeds(30, |seed| {
        let mut rng = Rng::new(seed);
        let shape = Shape::new(&mut rng);
        A::run(|| {
            let mut caches: Vec<AnyCache<A>> = vec![shape.make::<A>()];
            for _ in 0..20 {
                operate::<A>(&mut rng, &mut caches);
            }
            save(&mut *caches[0], &place.path, labels(&[5])).unwrap();
        });
        let saved = std::fs::read(&place.path).unwrap();
        B::run(|| {
            let mut cache = shape.make::<B>();
            load(&mut *cache, &place.path, MODEL).unwrap();
            save(&mut *cache, &place.path, labels(&[5])).unwrap();
        });
        let again = std::fs::read(&place.path).unwrap();
        let [saved, again] =
            [&saved, &again].map(|bytes| safetensors::SafeTensors::deserialize(bytes).unwrap());
        assert_eq!(saved.names().len(), again.names().len());
        // The order of words in the metadata may differ, and so may the checksum of the header.
        for name in saved.names().into_iter().filter(|&name| name != "checksums") {
            assert_eq!(saved.tensor(name).unwrap(), again.tensor(name).unwrap(), "{name}");
        }
    });
}

/// Returns a cache of one sequence with some rows.
fn filled<B: Backend>(config: CacheConfig, steps: usize) -> AnyCache<B> {
    let mut caches = vec![Shape { kind: 0, config }.make::<B>()];
    for seed in 0..steps as u64 {
        operate::<B>(&mut Rng::new(seed), &mut caches);
    }
    caches.remove(0)
}

pub fn a_file_that_does_not_fit_is_refused<B: Backend>() {
    let place = SaveFile::new();
    let mut config = CacheConfig::uniform(2, 2, 64, 40).stored_as(KvFormat::RowInt4);
    config.max_step_tokens = 12;
    config.layers[1].policy = LayerPolicy::Window { window: 4, sinks: 1 };
    B::run(|| {
        let mut cache = filled::<B>(config.clone(), 12);
        assert!(cache.length() > 3);
        save(&mut *cache, &place.path, labels(&[])).unwrap();
        let refused = |config: CacheConfig, kind, model: &str, words: &str| {
            let mut other = Shape { kind, config }.make::<B>();
            let error = load(&mut *other, &place.path, model).unwrap_err();
            assert_eq!(error.status(), Status::File, "{error}");
            assert!(error.message().contains(words), "{error}: expected {words}");
            assert_eq!(other.length(), 0);
        };
        refused(config.clone(), 0, "another", "of the model `a model`, expected `another`");
        refused(config.clone(), 1, MODEL, "of kind `contiguous`, but this cache is of kind `seq`");
        let changed = |change: &dyn Fn(&mut CacheConfig)| {
            let mut config = config.clone();
            change(&mut config);
            config
        };
        let more = changed(&|config| config.layers.push(config.layers[0]));
        refused(more, 0, MODEL, "the file has 2 layers, but this cache has 3");
        let heads = changed(&|config| config.layers[0].n_kv_heads = 1);
        refused(heads, 0, MODEL, "layer 0 has n_kv_heads 2 in the file, 1 here");
        let dims = changed(&|config| config.layers[1].v_head_dim = 128);
        refused(dims, 0, MODEL, "layer 1 has v_head_dim 64 in the file, 128 here");
        let in_keys = changed(&|config| config.layers[1].values_in_keys = true);
        refused(
            in_keys,
            0,
            MODEL,
            "layer 1 has its values apart from its keys in the file, in its",
        );
        let full = changed(&|config| config.layers[1].policy = LayerPolicy::Full);
        refused(full, 0, MODEL, "a window of 4 and 1 sinks in the file, full history here");
        let steps = changed(&|config| config.max_step_tokens = 3);
        refused(steps, 0, MODEL, "max_step_tokens 12, but those of this cache for 40 and 3");
        let format = changed(&|config| config.k_format = KvFormat::F16);
        refused(format, 0, MODEL, "keys in row-int4, but this cache stores them in f16");
        let full = |capacity| CacheConfig::uniform(1, 1, 64, capacity);
        let mut cache = filled::<B>(full(40), 12);
        save(&mut *cache, &place.path, labels(&[])).unwrap();
        refused(full(2), 0, MODEL, "the capacity of this cache is 2");
        std::fs::write(&place.path, b"no").unwrap();
        refused(full(40), 0, MODEL, "the file has 2 bytes, the minimum is 8");
        std::fs::remove_file(&place.path).unwrap();
        refused(full(40), 0, MODEL, "a cache.safetensors");
        cache.begin(&[cache.length()]).unwrap();
        for error in [
            save(&mut *cache, &place.path, labels(&[])).unwrap_err(),
            load(&mut *cache, &place.path, MODEL).unwrap_err(),
        ] {
            assert!(matches!(error.status(), Status::Step | Status::File), "{error}");
        }
        cache.abort();
    });
}

/// Rows that are saved in one float format and loaded in another equal the rows of a conversion.
pub fn float_formats_are_converted<B: Backend>() {
    let place = SaveFile::new();
    B::run(|| {
        let floats = [KvFormat::F32, KvFormat::F16, KvFormat::Bf16];
        for (from, to) in floats.iter().flat_map(|&from| floats.map(|to| (from, to))) {
            let config = CacheConfig::uniform(2, 2, 64, 300);
            let mut saved = filled::<B>(config.clone().stored_as(from), 10);
            assert!(saved.length() > 0);
            save(&mut *saved, &place.path, labels(&[])).unwrap();
            let mut loaded = Shape { kind: 0, config: config.stored_as(to) }.make::<B>();
            load(&mut *loaded, &place.path, MODEL).unwrap();
            assert_eq!(loaded.formats(), [to; 2]);
            saved.convert(to, to).unwrap();
            for seed in 0..10 {
                let positions = [saved.length()];
                let next = |cache| driver::forward::<B>(&mut Rng::new(seed), cache, &positions);
                assert_eq!(next(&mut saved), next(&mut loaded), "{from} to {to}");
            }
        }
    });
}
