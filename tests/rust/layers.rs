//! Caches that are used layer by layer, without a [`Step`].

use etkv::{
    layer_caches, CacheConfig, CellsCache, ContiguousCache, Forwards, KeyValueCache, KvFormat,
    LayerPolicy, Mask, MlxCache, MlxStore, SharedCache, Status, Step,
};
use etkv_tests::{on_mlx, oracle, Rng};
use mlx_rs::Array;

const N_LAYERS: usize = 3;

fn config(format: KvFormat) -> CacheConfig {
    CacheConfig {
        max_step_tokens: 8,
        ..CacheConfig::uniform(N_LAYERS, 2, 64, 64).stored_as(format)
    }
}

fn rows(seed: u64, n: usize) -> Array {
    on_mlx::array(&oracle::random_rows(&mut Rng::new(seed), n, 2, 64))
}

fn flat(array: &Array) -> Vec<f32> {
    array.contiguous().unwrap().as_slice::<f32>().to_vec()
}

/// Layers return the same rows as a [`Step`].
#[test]
fn layers_return_what_a_step_reads() {
    etkv::mlx::run(|| {
        for format in ["f32", "f16", "affine4g64", "row-int4"] {
            let format: KvFormat = format.parse()?;
            let caches: [Box<MlxCache>; 2] = [
                Box::new(ContiguousCache::new(config(format))?),
                Box::new(CellsCache::with_trees(config(format))?),
            ];
            for (index, mut stepped) in caches.into_iter().enumerate() {
                let mut layers = layer_caches(match index {
                    0 => SharedCache::new(ContiguousCache::new(config(format))?),
                    _ => SharedCache::new(CellsCache::new(config(format))?),
                })?;
                let mut length = 0;
                for n in [5, 1, 1, 8, 3] {
                    let positions: Vec<i32> = (length..length + n).collect();
                    let mut step = Step::begin(&mut *stepped, &positions)?;
                    for (id, layer) in layers.iter_mut().enumerate() {
                        let k = rows(length as u64 * 10 + id as u64, n as usize);
                        let v = k.negative()?;
                        assert_eq!((layer.offset(), layer.max_size()), (length, None));
                        let (keys, values) = layer.update_and_fetch(k.clone(), v.clone())?;
                        assert_eq!(layer.offset(), length + n);
                        let spec = step.update_and_fetch(id, &k, &v)?;
                        assert_eq!(keys.shape(), [1, 2, length + n, 64]);
                        assert_eq!(flat(&keys), flat(&spec.k.dequantized(keys.dtype())?));
                        assert_eq!(flat(&values), flat(&spec.v.dequantized(keys.dtype())?));
                    }
                    step.commit(&[])?;
                    length += n;
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

/// An aborted forward does not affect the next one.
#[test]
fn a_layer_that_comes_again_begins_anew() {
    etkv::mlx::run(|| {
        let cache = SharedCache::new(ContiguousCache::new(config(KvFormat::F32))?);
        let mut forwards = Forwards::new(cache.clone())?;
        let [first, second] = [rows(1, 2), rows(2, 2)];
        forwards.update_and_fetch(0, &[0, 1], &first, &first)?;
        forwards.update_and_fetch(1, &[0, 1], &first, &first)?;
        // Repeats the same positions with other rows.
        for layer in 0..N_LAYERS {
            let spec = forwards.update_and_fetch(layer, &[0, 1], &second, &second)?;
            assert!(matches!(spec.mask, Mask::Causal));
            assert_eq!(flat(&spec.k.dequantized(second.dtype())?), flat(&second));
        }
        assert_eq!(cache.lock()?.length(), 2);
        // Other callers see an open step, which ends when the forward is dropped.
        forwards.update_and_fetch(0, &[2, 3], &first, &first)?;
        assert_eq!(
            cache.program::<MlxStore>()?.lock()?.begin(&[2]).unwrap_err().status(),
            Status::Step
        );
        drop(forwards);
        assert_eq!(cache.lock()?.length(), 2);
        let program = cache.program::<MlxStore>()?;
        program.lock()?.begin(&[2])?;
        program.lock()?.abort();
        Ok(())
    })
    .unwrap();
}

/// The first step after a program is loaded compares values with keys in layers whose values are in their keys.
#[test]
fn values_in_keys_are_compared() {
    etkv::mlx::run(|| {
        let mut config = config(KvFormat::F32);
        config.layers[1].values_in_keys = true;
        for cache in [
            SharedCache::new(ContiguousCache::new(config.clone())?),
            SharedCache::new(CellsCache::new(config.clone())?),
        ] {
            let mut forwards = Forwards::new(cache.clone())?;
            let [k, v] = [rows(1, 2), rows(2, 2)];
            let mut run = |values: &Array, first: i32| -> Result<(), etkv::Error> {
                for layer in 0..N_LAYERS {
                    forwards.update_and_fetch(layer, &[first, first + 1], &k, values)?;
                }
                Ok(())
            };
            let refused = run(&v, 0).unwrap_err();
            assert_eq!(refused.status(), Status::Shape);
            assert!(refused.message().contains("layer 1"), "{refused}");
            assert_eq!(cache.lock()?.length(), 0);
            run(&k, 0)?;
            assert_eq!(cache.lock()?.length(), 2);
            // Another program may have other values.
            drop(forwards);
            let mut other = Forwards::new(cache.clone())?;
            other.update_and_fetch(0, &[2, 3], &k, &v)?;
            assert!(other.update_and_fetch(1, &[2, 3], &k, &v).is_err());
        }
        Ok(())
    })
    .unwrap();
}

/// Committed forwards whose arrays are not evaluated yet remain when the next forward is aborted.
#[test]
fn what_was_before_stays() {
    etkv::mlx::run(|| {
        for format in ["f32", "affine8g64"] {
            let format: KvFormat = format.parse()?;
            for (kind, cache) in [
                SharedCache::new(ContiguousCache::new(config(format))?),
                SharedCache::new(CellsCache::new(config(format))?),
            ]
            .into_iter()
            .enumerate()
            {
                let mut forwards = Forwards::new(cache.clone())?;
                for position in 0..4 {
                    let row = Array::full::<f32>(&[1, 2, 1, 64], Array::from_int(position + 1))?;
                    for layer in 0..N_LAYERS {
                        forwards.update_and_fetch(layer, &[position], &row, &row)?;
                    }
                }
                let row = Array::full::<f32>(&[1, 2, 1, 64], Array::from_int(9))?;
                // The forward is aborted, refused, and begun again.
                forwards.update_and_fetch(0, &[4], &row, &row)?;
                forwards.abort();
                forwards.update_and_fetch(0, &[4], &row, &row)?;
                forwards.update_and_fetch(1, &[6], &row, &row).unwrap_err();
                forwards.update_and_fetch(0, &[4], &row, &row)?;
                let spec = forwards.update_and_fetch(0, &[4], &row, &row)?;
                let keys = flat(&spec.k.dequantized(mlx_rs::Dtype::Float32)?);
                for (position, expected) in [1.0, 2.0, 3.0, 4.0, 9.0].into_iter().enumerate() {
                    let found = keys[position * 64];
                    assert!(
                        (found - expected).abs() < 0.1,
                        "{kind} {format}: {found} at {position}"
                    );
                }
                assert_eq!(cache.lock()?.length(), 4);
            }
        }
        Ok(())
    })
    .unwrap();
}

/// The last layer ends a forward only if its attention succeeds.
#[test]
fn a_forward_whose_last_call_fails_does_not_count() {
    etkv::mlx::run(|| {
        let cache = SharedCache::new(ContiguousCache::new(config(KvFormat::F32))?);
        let mut forwards = Forwards::new(cache.clone())?;
        let two = rows(1, 2);
        // Queries of 3 heads cannot attend to keys of 2 heads.
        let q = Array::ones::<f32>(&[1, 3, 2, 64])?;
        for failing in [0, N_LAYERS - 1] {
            for layer in 0..=failing {
                let attended = forwards.update_and(layer, &[0, 1], &two, &two, |spec| {
                    let q = if layer == failing { &q } else { &two };
                    etkv::attend(q, spec, 0.125, None)
                });
                assert_eq!(attended.is_err(), layer == failing);
            }
            assert_eq!(cache.lock()?.length(), 0);
            // No forward is open.
            let program = cache.program::<MlxStore>()?;
            program.lock()?.begin(&[0])?;
            program.lock()?.abort();
        }
        for layer in 0..N_LAYERS {
            forwards.update_and(layer, &[0, 1], &two, &two, |spec| {
                etkv::attend(&two, spec, 0.125, None)
            })?;
        }
        assert_eq!(cache.lock()?.length(), 2);
        Ok(())
    })
    .unwrap();
}

#[test]
fn what_is_refused_changes_nothing() {
    etkv::mlx::run(|| {
        let mut windowed = config(KvFormat::F32);
        windowed.layers[N_LAYERS - 1].policy = LayerPolicy::Window { window: 2, sinks: 1 };
        let cache = SharedCache::new(ContiguousCache::new(windowed)?);
        let mut layers = layer_caches(cache.clone())?;
        assert_eq!(layers[N_LAYERS - 1].max_size(), Some(3));
        let five = rows(1, 5);
        for layer in &mut layers[..N_LAYERS - 1] {
            layer.update_and_fetch(five.clone(), five.clone())?;
        }
        // Queries at the edge of a window do not see all rows that were read.
        let error = layers[N_LAYERS - 1].update_and_fetch(five.clone(), five.clone()).unwrap_err();
        assert_eq!(error.status(), Status::Unsupported, "{error}");
        assert!(error.message().contains("5 queries of layer 2 from position 0"), "{error}");
        assert_eq!(cache.lock()?.length(), 0);
        assert_eq!(layers[0].offset(), 0);

        let wrong = Array::ones::<f32>(&[1, 3, 5, 64])?;
        let error = layers[0].update_and_fetch(wrong.clone(), wrong).unwrap_err();
        assert_eq!(error.status(), Status::Shape, "{error}");
        let flat = Array::ones::<f32>(&[64])?;
        assert!(layers[0].update_and_fetch(flat.clone(), flat).is_err());
        assert_eq!(cache.lock()?.length(), 0);
        Ok(())
    })
    .unwrap();
}

/// After the first positions are removed, the next position is not the number of positions.
#[test]
fn offsets_are_positions() {
    etkv::mlx::run(|| {
        let cache = SharedCache::new(CellsCache::new(config(KvFormat::F32))?);
        let mut layers = layer_caches(cache.clone())?;
        let five = rows(1, 5);
        for layer in &mut layers {
            layer.update_and_fetch(five.clone(), five.clone())?;
        }
        cache.lock()?.sequences_mut().unwrap().seq_rm(0, 0..2)?;
        let one = rows(2, 1);
        for layer in &mut layers {
            assert_eq!(layer.offset(), 5);
            let (keys, _) = layer.update_and_fetch(one.clone(), one.clone())?;
            assert_eq!(keys.dim(2), 4);
        }
        assert_eq!(cache.lock()?.next_position()?, 6);
        Ok(())
    })
    .unwrap();
}
