use etkv_core::{Cache, CacheConfig, SeqCache, TreeCache};

use super::*;
use crate::backend::{CellsCache, ContiguousCache};

const LAYERS: usize = 2;

fn config() -> CacheConfig {
    let config = CacheConfig::uniform(LAYERS, 1, 8, 32).stored_as(KvFormat::F16);
    CacheConfig { max_step_tokens: 8, ..config }
}

/// Places the rows of a step, and commits it if the kernels can take them.
fn placed(cache: &mut MlxCache, positions: &[i32]) -> Option<Rows> {
    let mut step = Step::begin(cache, positions).unwrap();
    let rows = Rows::place(&mut step, LAYERS).unwrap();
    if rows.is_some() {
        step.commit(&[]).unwrap();
    }
    rows
}

/// Returns the keys that each token sees.
fn seen(rows: &Rows) -> Vec<Vec<usize>> {
    let mask = rows.mask.as_ref().unwrap();
    let of = |token| (0..rows.n_keys).filter(|&key| mask.sees(token, key)).collect();
    (0..rows.slots.len()).map(of).collect()
}

#[test]
fn rows_of_full_history_go_behind_all_that_is_read() {
    let mut contiguous = ContiguousCache::new(config()).unwrap();
    // A single sequence is read likewise.
    let mut cells = CellsCache::new(config()).unwrap();
    for cache in [&mut contiguous as &mut MlxCache, &mut cells] {
        for (first, n) in [(0, 3), (3, 1), (4, 2)] {
            let slots = first..first + n;
            let rows = placed(cache, &slots.clone().collect::<Vec<_>>()).unwrap();
            assert!(slots.clone().eq(rows.slots.iter().copied()), "{rows:?}");
            assert_eq!((rows.n_keys, rows.mask), (slots.end as usize, None));
        }
    }
    // A step may rewind.
    let rows = placed(&mut contiguous, &[1]).unwrap();
    assert_eq!((&rows.slots[..], rows.n_keys, rows.mask), (&[1][..], 2, None));
    assert_eq!(contiguous.length(), 2);
}

#[test]
fn layers_that_see_other_keys_are_rolled_back() {
    let mut windows = config();
    windows.layers[1].policy = LayerPolicy::Window { window: 4, sinks: 0 };
    let mut cache = ContiguousCache::new(windows).unwrap();
    assert_eq!(placed(&mut cache, &[0, 1, 2, 3, 4, 5]), None);
    assert_eq!(cache.length(), 0);
}

#[test]
fn tokens_of_several_sequences_see_their_own_keys() {
    let mut cells = CellsCache::new(config()).unwrap();
    for sequence in [0, 1] {
        cells.begin_step(&[sequence; 3]).unwrap();
        placed(&mut cells, &[0, 1, 2]).unwrap();
    }
    cells.begin_step(&[1, 0]).unwrap();
    let rows = placed(&mut cells, &[3, 3]).unwrap();
    assert_eq!((&rows.slots[..], rows.n_keys), (&[6, 7][..], 8));
    assert_eq!(seen(&rows), [[3, 4, 5, 6], [0, 1, 2, 7]]);
    // A single one is read as one run, wherever it begins.
    cells.seq_rm(0, 0..i32::MAX).unwrap();
    let rows = placed(&mut cells, &[4]).unwrap();
    assert_eq!((&rows.slots[..], seen(&rows)), (&[7][..], vec![vec![3, 4, 5, 6, 7]]));
}

#[test]
fn candidates_see_those_that_lead_to_them() {
    let mut cells = CellsCache::with_trees(config()).unwrap();
    placed(&mut cells, &[0, 1]).unwrap();
    // Two that follow the sequence, and one behind each.
    cells.propose(0, &[-1, -1, 0, 1]).unwrap();
    let rows = placed(&mut cells, &[2, 2, 3, 3]).unwrap();
    assert_eq!(rows.slots[..], [2, 3, 4, 5]);
    assert_eq!(seen(&rows), [vec![0, 1, 2], vec![0, 1, 3], vec![0, 1, 2, 4], vec![0, 1, 3, 5]]);
}
