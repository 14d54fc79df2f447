//! In a step of one token, the store allocates nothing.

mod counting;

use counting::allocations;
use etkv_core::bookkeeping::Slots;
use etkv_core::{CacheConfig, Store, StoreLayer};
use etkv_cpu::attention::synthetic::formats;
use etkv_cpu::{CpuStore, Tensor};

#[test]
fn a_step_of_one_token_allocates_nothing() {
    for format in formats() {
        let (heads, dim) = (2, 128);
        let layer = StoreLayer::from(&CacheConfig::uniform(1, heads, dim, 64).layers[0]);
        let mut store = CpuStore::new(&[layer; 2], [format; 2]).unwrap();
        for layer in 0..2 {
            store.grow(layer, 64).unwrap();
        }
        let n = (heads * dim) as usize;
        let rows = Tensor::new([1, heads, 1, dim], vec![half::f16::from_f32(0.3); n]).unwrap();
        let mut step = |slot: i32| {
            let saved = store.begin(&[]).unwrap();
            for layer in 0..2 {
                store.grow(layer, slot + 1).unwrap();
                store.write(layer, &Slots::Run(slot..slot + 1), &rows, Some(&rows), true).unwrap();
                let [k, v] = store.read(layer, 0..slot + 1).unwrap();
                assert_eq!((k.len(), v.len()), (slot as usize + 1, slot as usize + 1));
            }
            store.eval(&[&rows]).unwrap();
            assert_eq!(store.non_finite(), None);
            store.end();
            drop(saved);
        };
        // The first step allocates the list of watched writes.
        step(0);
        assert_eq!(allocations(|| (1..64).for_each(&mut step)), 0, "{format}");
    }
}
