//! Moves of rows: a few rows in all layers at once, and many rows in one layer after the other.

use etkv_core::bookkeeping::Slots;
use etkv_core::snapshot::PlaneId;
use etkv_core::{LayerConfig, LayerPolicy, Store, StoreLayer};

use crate::mlx;
use crate::store::tests::rows;
use crate::store::MlxStore;
use crate::KvFormat;

const LAYERS: usize = 3;
const HEADS: i32 = 2;
const DIM: i32 = 64;
const SLOTS: i32 = 160;

/// A store whose slots all have different rows.
fn filled(format: KvFormat) -> MlxStore {
    let policy = LayerPolicy::Full;
    let layer = LayerConfig {
        n_kv_heads: HEADS,
        k_head_dim: DIM,
        v_head_dim: DIM,
        policy,
        values_in_keys: false,
    };
    let mut store = MlxStore::new(&[StoreLayer::from(&layer); LAYERS], [format; 2]).unwrap();
    for layer in 0..LAYERS {
        store.grow(layer, SLOTS).unwrap();
        let new = |seed| rows(seed + layer as u64, HEADS, SLOTS, DIM);
        let (k, v) = (new(10), new(20));
        mlx::run(|| Ok(store.write(layer, &Slots::Run(0..SLOTS), &k, Some(&v), false)?)).unwrap();
    }
    store
}

/// Returns the bits of each slot of a plane.
fn slots_of(store: &MlxStore, id: PlaneId, bytes: usize, slots: i32) -> Vec<Vec<u8>> {
    let mut all = vec![0; slots as usize * bytes];
    store.copy_out(id, &Slots::Run(0..slots), &mut all).unwrap();
    all.chunks(bytes).map(<[u8]>::to_vec).collect()
}

#[test]
fn rows_move_in_the_layers_that_are_named() {
    let cases = [
        // A chain of a tree. Some sources are also targets, so all rows are read first.
        (Slots::List(vec![5, 7, 8]), Slots::Run(4..7), SLOTS),
        (Slots::List(vec![3, 2, 1, 0]), Slots::Run(0..4), SLOTS),
        // The targets are slots that were never used.
        (Slots::Run(10..12), Slots::Run(SLOTS..SLOTS + 2), SLOTS + 8),
        // More rows than are moved in all layers at once.
        (Slots::Run(50..150), Slots::Run(20..120), SLOTS),
    ];
    let affine = KvFormat::Affine { bits: 4, group: 64 };
    for format in [KvFormat::F32, KvFormat::Bf16, affine, KvFormat::Nvfp4, KvFormat::RowInt4] {
        for (from, to, slots) in &cases {
            let mut store = filled(format);
            let planes = format.planes(DIM as usize);
            let read = |store: &MlxStore, layer: usize| {
                let ids = [false, true].map(|values| {
                    planes.iter().enumerate().map(move |(plane, rows)| {
                        let id = PlaneId { layer, values, plane };
                        (id, HEADS as usize * rows.row_bytes())
                    })
                });
                let slots = store.extents(layer)[0].slots;
                let of_plane = |(id, bytes)| slots_of(store, id, bytes, slots);
                ids.into_iter().flatten().map(of_plane).collect::<Vec<_>>()
            };
            let before: Vec<_> = (0..LAYERS).map(|layer| read(&store, layer)).collect();
            store.relocate(&[0, 2], from, to, *slots).unwrap();
            for (layer, before) in before.iter().enumerate() {
                for (before, after) in before.iter().zip(read(&store, layer)) {
                    let mut expected = before.clone();
                    if layer != 1 {
                        expected.resize(after.len(), vec![0; before[0].len()]);
                        for (from, to) in from.iter().zip(to.iter()) {
                            expected[to as usize].clone_from(&before[from as usize]);
                        }
                    }
                    assert!(after == expected, "{format}, layer {layer}, {from:?} to {to:?}");
                }
            }
        }
    }
}
