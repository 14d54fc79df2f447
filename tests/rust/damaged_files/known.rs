//! Cases of damage that generated files have found, or that require a certain cache.

use etkv_core::bookkeeping::BLOCK;
use etkv_core::snapshot::{Book, CellsState};
use etkv_core::{CacheConfig, LayerPolicy, RecurrentLayer, Snapshot, Status};
use etkv_file::{load, save};
use etkv_tests::campaign::saving::driver::{forward, Shape};
use etkv_tests::on_cpu::OnCpu;
use etkv_tests::stores::{labels, MODEL};
use etkv_tests::Rng;

use crate::file::Parts;
use crate::subject::AnyCache;

fn shape() -> Shape {
    let recurrence = RecurrentLayer::Recurrence {
        k_heads: 1,
        heads: 2,
        k_dim: 32,
        v_dim: 32,
        channel_decay: false,
    };
    let config =
        CacheConfig { recurrent_layers: vec![recurrence], ..CacheConfig::uniform(1, 1, 8, 4000) };
    Shape { kind: 0, config }
}

/// Returns a cache of one sequence that has read `n` tokens in steps of at most 100.
fn filled(shape: &Shape, n: i32) -> AnyCache {
    let mut cache = shape.make::<OnCpu>();
    for start in (0..n).step_by(100) {
        let positions: Vec<i32> = (start..n.min(start + 100)).collect();
        forward::<OnCpu>(&mut Rng::new(start as u64), &mut cache, &positions).unwrap();
    }
    cache
}

/// Saves the file of a cache with other integers, and loads it into another cache.
fn reload(
    cache: &mut AnyCache,
    shape: &Shape,
    change: impl Fn(&mut CellsState),
) -> etkv_core::Result<AnyCache> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.safetensors");
    save(&mut **cache, &path, labels(&[])).unwrap();
    let mut parts = Parts::of(&std::fs::read(&path).unwrap());
    let Snapshot { book: Book::Cells(state), .. } = &mut parts.snapshot else { panic!() };
    change(state);
    std::fs::write(&path, parts.to_bytes()).unwrap();
    let mut other = shape.make::<OnCpu>();
    load(&mut *other, &path, MODEL).map(|_| other)
}

#[test]
fn a_contiguous_cache_has_sequence_0_only() {
    let shape = shape();
    let mut cache = filled(&shape, 150);
    let error = reload(&mut cache, &shape, |state| {
        let recurrent = state.recurrent.as_mut().unwrap();
        let own = [&mut recurrent.rows, &mut recurrent.anchors];
        for group in state.groups.iter_mut().chain(own) {
            group.sequences.iter_mut().for_each(|held| held.sequence = 5);
        }
    });
    let error = error.err().unwrap();
    assert_eq!(error.status(), Status::File);
    assert!(error.message().contains("it has sequence 5"), "{error}");
}

/// An anchor needs 8 KiB here, so 3000 of them would need 24 MiB.
#[test]
fn a_distant_slot_takes_no_memory() {
    let shape = shape();
    let mut cache = filled(&shape, 150);
    let mut loaded = reload(&mut cache, &shape, |state| {
        let recurrent = state.recurrent.as_mut().unwrap();
        for (group, by) in [(&mut recurrent.anchors, 3000), (&mut recurrent.rows, 2000)] {
            let runs = group.sequences.iter_mut().flat_map(|held| &mut held.runs);
            runs.for_each(|run| run[1] += by);
            group.size = 4000;
        }
    })
    .unwrap();
    let [found, expected] = [loaded.memory(), cache.memory()].map(|memory| memory.allocated);
    assert_eq!(found, expected);
    // Both caches give the same results.
    for at in 150..200 {
        let [one, other] = [&mut cache, &mut loaded]
            .map(|cache| forward::<OnCpu>(&mut Rng::new(at as u64), cache, &[at]).unwrap());
        assert_eq!(one, other);
    }
}

/// The texts diverge at a position to which a window can no longer be rewound. The cache is rewound to a lower
/// position instead.
#[test]
fn positions_that_can_no_longer_be_marked_are_skipped() {
    let mut shape = shape();
    shape.config.layers[0].policy = LayerPolicy::Window { window: 30, sinks: 0 };
    shape.config.max_step_tokens = 10;
    let mut cache = shape.make::<OnCpu>();
    let n = BLOCK + 50;
    for at in 0..n {
        forward::<OnCpu>(&mut Rng::new(at as u64), &mut cache, &[at]).unwrap();
    }
    assert!(cache.rewindable_to().unwrap() > BLOCK);
    assert_eq!(cache.mark(n + 5).unwrap_err().status(), Status::Position);
    assert_eq!(cache.rewind_to_reachable(n + 5).unwrap(), n);
}
