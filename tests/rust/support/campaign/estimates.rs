//! A cache uses exactly the memory that its config estimates.

use etkv_core::{AttendCache, CacheConfig, Growth, LayerConfig, LayerPolicy, Step};

use super::ones;
use super::saving::driver::Shape;
use crate::backend::Backend;

fn config(capacity: i32, policies: &[LayerPolicy]) -> CacheConfig {
    let layer = |(&policy, values_in_keys): (&LayerPolicy, bool)| LayerConfig {
        n_kv_heads: 2,
        k_head_dim: 64,
        v_head_dim: 64,
        policy,
        values_in_keys,
    };
    CacheConfig {
        layers: policies
            .iter()
            .flat_map(|policy| [(policy, false), (policy, true)])
            .map(layer)
            .collect(),
        max_step_tokens: 4,
        ..CacheConfig::uniform(1, 1, 1, capacity).stored_as("affine4g32".parse().unwrap())
    }
}

/// Runs one forward of a program whose layers all have the same keys and queries.
fn step<B: Backend>(cache: &mut dyn AttendCache<Store = B::Store>, positions: &[i32]) {
    let (rows, mut x) = (ones::<B>(2, positions.len(), 64), ones::<B>(4, positions.len(), 64));
    let n_layers = cache.config().layers.len();
    let mut step = Step::begin(cache, positions).unwrap();
    for layer in 0..n_layers {
        let spec = step.update_and_fetch(layer, &rows, &rows).unwrap();
        // Each layer depends on the previous one, as in a program.
        x = B::attend(&x, &spec, 0.1).unwrap();
    }
    step.commit(&[&x]).unwrap();
}

/// Covers every layer policy, growth and kind, before and after the conversion.
pub fn memory_matches_estimates_at_every_length<B: Backend>() {
    let policies = [
        LayerPolicy::Full,
        LayerPolicy::Window { window: 8, sinks: 0 },
        LayerPolicy::Window { window: 5, sinks: 2 },
        LayerPolicy::Chunk { chunk: 7 },
    ];
    let growths =
        [Growth::Doubling { first: 8 }, Growth::Step { step: 6 }, Growth::Exact, Growth::Upfront];
    B::run(|| {
        for (growth, quantized_kv_start) in
            growths.into_iter().flat_map(|growth| [(growth, None), (growth, Some(30))])
        {
            let config = CacheConfig { growth, quantized_kv_start, ..config(90, &policies) };
            for kind in 0..3 {
                let mut cache = Shape { kind, config: config.clone() }.make::<B>();
                let kind = cache.kind().to_owned();
                let estimate = |length| match kind.as_str() {
                    "contiguous" => config.estimate(length),
                    _ => config.estimate_shared(length),
                };
                let mut length = 0;
                while length < 90 {
                    assert_eq!(cache.memory(), estimate(length), "{kind} {growth:?} at {length}");
                    assert_eq!(cache.formats(), config.formats_at(length));
                    let n = (1 + length % 3).min(90 - length);
                    let positions: Vec<i32> = (length..length + n).collect();
                    step::<B>(&mut *cache, &positions);
                    length += n;
                }
                assert_eq!(cache.memory(), estimate(90));
                assert!(cache.memory().allocated <= cache.memory().at_capacity);
                cache.clear(false).unwrap();
                assert_eq!(cache.formats(), config.formats_at(0), "{kind}: as new");
                if growth == Growth::Upfront {
                    assert_eq!(cache.memory().allocated, estimate(0).allocated);
                }
            }
        }
    });
}
