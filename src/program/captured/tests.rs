use etkv_core::{Cache, CacheConfig, LayerPolicy};

use super::*;
use crate::backend::{CellsCache, ContiguousCache};

const LAYERS: usize = 2;

fn config() -> CacheConfig {
    let config = CacheConfig::uniform(LAYERS, 1, 8, 32).stored_as(KvFormat::F16);
    CacheConfig { max_step_tokens: 8, ..config }
}

/// Places the rows of a step, and commits it if the kernels can take them.
fn placed(cache: &mut MlxCache, positions: &[i32]) -> Option<Range<i32>> {
    let mut step = Step::begin(cache, positions).unwrap();
    let slots = place(&mut step, LAYERS).unwrap();
    if slots.is_some() {
        step.commit(&[]).unwrap();
    }
    slots
}

#[test]
fn rows_of_full_history_go_behind_all_that_is_read() {
    let mut cache = ContiguousCache::new(config()).unwrap();
    assert_eq!(placed(&mut cache, &[0, 1, 2]), Some(0..3));
    assert_eq!(placed(&mut cache, &[3]), Some(3..4));
    assert_eq!(placed(&mut cache, &[4, 5]), Some(4..6));
    // A step may rewind.
    assert_eq!(placed(&mut cache, &[1]), Some(1..2));
    assert_eq!(cache.length(), 2);
}

#[test]
fn what_the_kernels_cannot_take_is_rolled_back() {
    let mut windows = config();
    windows.layers[1].policy = LayerPolicy::Window { window: 4, sinks: 0 };
    let mut cache = ContiguousCache::new(windows).unwrap();
    // The queries of a window see different keys.
    assert_eq!(placed(&mut cache, &[0, 1, 2, 3, 4, 5]), None);
    assert_eq!(cache.length(), 0);
    let mut cells = CellsCache::new(config()).unwrap();
    assert_eq!(placed(&mut cells, &[0]), None);
    assert_eq!(cells.length(), 0);
}
