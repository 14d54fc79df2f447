//! States in files. States that steps produce are accepted, and all other states are refused.

use etkv_core::bookkeeping::{CellsBookkeeping, RecurrentWindow, Window, BLOCK};
use etkv_core::{CacheConfig, LayerPolicy, Status};

use super::step;

const CAPACITY: i32 = 300;

fn window(window: i32, sinks: i32) -> Window {
    let config = CacheConfig { max_step_tokens: 40, ..CacheConfig::uniform(1, 1, 1, CAPACITY) };
    config.window(LayerPolicy::Window { window, sinks }).unwrap()
}

fn append(book: &mut CellsBookkeeping, sequence: i32, n: i32) {
    step(book, &[sequence], n);
}

/// Returns a run for each position of some runs.
fn each(runs: &[[i32; 3]]) -> impl Iterator<Item = [i32; 3]> + '_ {
    runs.iter()
        .flat_map(|&[position, cell, len]| (0..len).map(move |at| [position + at, cell + at, 1]))
}

/// Returns a sequence of 100 positions without positions 50 to 59, in layers of full history and of a window.
fn with_a_gap() -> CellsBookkeeping {
    let book = CellsBookkeeping::new(CAPACITY, [window(30, 2)]);
    let mut book = book.with_recurrent(None, 8);
    (0..5).for_each(|_| append(&mut book, 0, 20));
    book.seq_rm(0, 50..60).unwrap();
    book
}

#[test]
fn a_length_within_removed_positions_is_reached_before_them() {
    let book = with_a_gap();
    let reachable = |at| book.reachable(0, at).unwrap();
    assert_eq!([100, 61, 60, 55, 50, 49].map(reachable), [100, 61, 50, 50, 50, 49]);
    for at in 1..=100 {
        let mut rewound = book.clone();
        let reached = reachable(at);
        rewound.rewind(reached).unwrap();
        assert_eq!(rewound.seq_next(0).unwrap(), reached);
    }
}

#[test]
fn a_checkpoint_after_removed_positions_is_loaded() {
    let mut book = with_a_gap();
    assert_eq!(book.mark(0, 70).unwrap(), 70);
    let state = book.state();
    let loaded = book.with_state(&state).unwrap();
    assert_eq!(loaded.checkpoints_of(0).unwrap(), [70]);
    assert_eq!(loaded.state(), state);
}

#[test]
fn a_checkpoint_with_later_positions_is_refused() {
    let mut book = with_a_gap();
    book.mark(0, 70).unwrap();
    let mut state = book.state();
    let text = state.groups[1].sequences[0].runs.clone();
    let kept = &mut state.groups[1].sequences[1];
    assert_eq!(kept.sequence, 256);
    kept.runs = text;
    let error = book.with_state(&state).unwrap_err();
    assert!(error.message().contains("the checkpoint at 70"), "{error}");
}

#[test]
fn a_checkpoint_within_removed_positions_is_refused() {
    let mut book = with_a_gap();
    book.mark(0, 70).unwrap();
    for position in [52, 60] {
        let mut state = book.state();
        state.checkpoints[0].position = position;
        let kept = &mut state.groups[1].sequences[1].runs;
        kept.retain(|[first, ..]| *first < 50);
        let error = book.with_state(&state).unwrap_err();
        assert!(error.message().contains("lacks the position before it"), "{error}");
    }
}

#[test]
fn a_window_that_lacks_visible_positions_is_refused() {
    let book = CellsBookkeeping::new(CAPACITY, [window(30, 2)]);
    let mut book = book.with_recurrent(None, 8);
    (0..5).for_each(|_| append(&mut book, 3, 20));
    let state = book.state();
    for positions in [0..1, 1..2, 71..72, 99..100] {
        let mut damaged = state.clone();
        let runs = &mut damaged.groups[1].sequences[0].runs;
        *runs = each(runs).filter(|[position, ..]| !positions.contains(position)).collect();
        let error = book.with_state(&damaged).unwrap_err();
        assert_eq!(error.status(), Status::File);
        assert!(error.message().contains("a window lacks positions of sequence 3"), "{error}");
    }
    book.with_state(&state).unwrap();
}

/// A file may contain any slot. High slots that would need too much memory are refused, or the rows are moved to low
/// slots.
#[test]
fn rows_and_anchors_in_distant_slots_are_packed_or_refused() {
    let window = RecurrentWindow { lead: 3, anchors: 2 };
    let mut book = CellsBookkeeping::new(CAPACITY, []).with_recurrent(Some(window), 8);
    (0..4).for_each(|_| append(&mut book, 0, BLOCK));
    let state = book.state();
    let moved = |by: i32| {
        let mut moved = state.clone();
        let recurrent = moved.recurrent.as_mut().unwrap();
        for group in [&mut recurrent.rows, &mut recurrent.anchors] {
            let last = group.sequences.iter_mut().flat_map(|held| &mut held.runs).last().unwrap();
            last[1] += by;
            group.size = i32::MAX;
        }
        moved
    };
    for by in [1, 40] {
        let mut loaded = book.with_state(&moved(by)).unwrap();
        loaded.pack_recurrent();
        for group in [1, 2] {
            let held = loaded.held_cells(group);
            assert_eq!(held.end(), held.len() as i32, "{held:?}");
        }
        append(&mut loaded, 0, 1);
    }
    for by in [CAPACITY, 1 << 20, i32::MAX - 1000] {
        let error = book.with_state(&moved(by)).unwrap_err();
        assert_eq!(error.status(), Status::File);
        assert!(error.message().contains("this cache has 300"), "{error}");
    }
}

/// The state after each position at or after the oldest anchor must follow from the contents of the file.
#[test]
fn an_anchor_whose_rows_are_missing_is_refused() {
    let window = RecurrentWindow { lead: 5, anchors: 2 };
    let mut book = CellsBookkeeping::new(CAPACITY, []).with_recurrent(Some(window), 8);
    (0..4).for_each(|_| append(&mut book, 0, BLOCK - 2));
    let state = book.state();
    assert_eq!(book.rewindable_to(0).unwrap(), 2 * BLOCK);
    let rows = &state.recurrent.as_ref().unwrap().rows.sequences[0].runs;
    assert_eq!(rows[0][0], 2 * BLOCK - 5);
    for lost in [1, 5, 70] {
        let mut damaged = state.clone();
        let runs = &mut damaged.recurrent.as_mut().unwrap().rows.sequences[0].runs;
        *runs = each(runs).skip(lost).collect();
        let error = book.with_state(&damaged).unwrap_err();
        assert_eq!(error.status(), Status::File);
        assert!(error.message().contains("lacks rows or anchors"), "{error}");
    }
    book.with_state(&state).unwrap();
}

/// If the file has all rows of a text, it must have all anchors.
#[test]
fn rows_whose_anchors_are_missing_are_refused() {
    let window = RecurrentWindow { lead: 5, anchors: 3 };
    let mut book = CellsBookkeeping::new(CAPACITY, []).with_recurrent(Some(window), 8);
    (0..3).for_each(|_| append(&mut book, 0, BLOCK));
    append(&mut book, 0, 1);
    let state = book.state();
    assert_eq!(book.rewindable_to(0).unwrap(), BLOCK);
    let mut damaged = state.clone();
    let recurrent = damaged.recurrent.as_mut().unwrap();
    let runs = recurrent.rows.sequences[0].runs.clone();
    let n: i32 = runs.iter().map(|[.., len]| len).sum();
    recurrent.rows.sequences[0].runs = vec![[0, 0, 3 * BLOCK + 1]];
    book.with_state(&damaged).unwrap();
    assert_eq!(n, 2 * BLOCK + 6);
    // Removes the anchor at 64.
    let runs = &mut damaged.recurrent.as_mut().unwrap().anchors.sequences[0].runs;
    *runs = each(runs).skip(1).collect();
    let error = book.with_state(&damaged).unwrap_err();
    assert!(error.message().contains("lacks rows or anchors"), "{error}");
}

/// Candidates whose chain passes a block boundary depend on the anchor there.
#[test]
fn a_tree_that_lacks_an_anchor_is_refused() {
    let window = RecurrentWindow { lead: 3, anchors: 2 };
    for (length, depth) in [(BLOCK - 4, 10), (BLOCK, 2)] {
        let mut book = CellsBookkeeping::new(CAPACITY, []).with_recurrent(Some(window), 8);
        append(&mut book, 0, length);
        book.propose(0, &(-1..depth - 1).collect::<Vec<_>>()).unwrap();
        book.plan(&(length..length + depth).collect::<Vec<_>>()).unwrap();
        book.commit().unwrap();
        let state = book.state();
        book.with_state(&state).unwrap();
        let mut damaged = state.clone();
        damaged.trees[0].anchors.clear();
        let anchors = &mut damaged.recurrent.as_mut().unwrap().anchors.sequences;
        assert_eq!(anchors.len() + state.trees[0].anchors.len(), 1);
        anchors.clear();
        let error = book.with_state(&damaged).unwrap_err();
        assert!(error.message().contains("the tree of sequence 0 lacks an anchor"), "{error}");
    }
}

#[test]
fn a_tree_with_the_rows_of_layers_that_a_cache_lacks_is_refused() {
    let mut book = CellsBookkeeping::new(CAPACITY, []);
    append(&mut book, 0, 5);
    book.propose(0, &[-1]).unwrap();
    book.plan(&[5]).unwrap();
    book.commit().unwrap();
    let state = book.state();
    book.with_state(&state).unwrap();
    for (rows, anchors) in [(vec![0], vec![]), (vec![], vec![(0, 0)])] {
        let mut damaged = state.clone();
        (damaged.trees[0].rows, damaged.trees[0].anchors) = (rows, anchors);
        let error = book.with_state(&damaged).unwrap_err();
        assert!(error.message().contains("a tree has rows of recurrent layers"), "{error}");
    }
}
