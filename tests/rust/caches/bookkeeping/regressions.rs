//! Cases that generated operations have found, and cases that they reach only rarely.

use etkv_core::LayerPolicy;

use super::cells::{replay, Config, Op, Op::*};

/// Returns the config of a cache with full history and a window.
fn with_window(capacity: i32, max_step_tokens: i32, window: i32, sinks: i32) -> Config {
    Config { capacity, max_step_tokens, policies: vec![LayerPolicy::Window { window, sinks }] }
}

/// A step of `n` tokens for each of these sequences, one sequence after the other.
fn step(sequences: &[i32], n: i32) -> Op {
    Step { sequences: sequences.to_vec(), n, in_turns: false, abort: false }
}

/// A step of `n` tokens for each of these sequences, interleaved.
fn in_turns(sequences: &[i32], n: i32) -> Op {
    Step { sequences: sequences.to_vec(), n, in_turns: true, abort: false }
}

#[test]
fn a_step_hides_its_own_tokens_outside_the_window() {
    replay(with_window(30, 7, 1, 4), &[step(&[0], 3), step(&[0], 3)]);
}

#[test]
fn a_copy_may_end_long_before_the_window() {
    replay(
        with_window(30, 2, 1, 0),
        &[
            step(&[21, 1], 1),
            step(&[0, 1], 1),
            step(&[0], 2),
            in_turns(&[0, 1], 2),
            in_turns(&[0, 1], 2),
            in_turns(&[0, 1], 2),
            Copy { source: 0, target: 21, start: 127, end: 964 },
            step(&[21], 1),
        ],
    );
}

#[test]
fn nothing_removed_keeps_the_tree() {
    replay(
        with_window(8, 1, 20, 0),
        &[
            Propose { sequence: 2, parents: vec![538, 508] },
            Remove { sequence: 2, start: 0, end: 550 },
        ],
    );
}

#[test]
fn compaction_puts_trees_after_their_sequences() {
    replay(
        Config { capacity: 30, max_step_tokens: 2, policies: vec![] },
        &[
            step(&[1, 0], 1),
            step(&[1], 1),
            Propose { sequence: 1, parents: vec![808, 501, 56, 625, 874] },
            Undeclared { n: 2, abort: false },
            Compact,
        ],
    );
}

#[test]
fn a_chain_of_candidates_in_cells_elsewhere_takes_a_mask() {
    replay(
        Config { capacity: 12, max_step_tokens: 4, policies: vec![] },
        &[
            step(&[0], 3),
            step(&[1], 1),
            step(&[2], 1),
            Propose { sequence: 0, parents: vec![0] },
            Undeclared { n: 1, abort: false },
            step(&[3], 1),
            Remove { sequence: 2, start: 0, end: i32::MAX },
            Propose { sequence: 0, parents: vec![i32::MAX] },
            // There is a free cell after the three tokens and the candidate, but not directly after the tokens.
            Undeclared { n: 1, abort: false },
        ],
    );
}

#[test]
fn a_copy_that_ends_before_the_window_is_read_from_where_it_goes_on() {
    replay(
        with_window(30, 2, 1, 0),
        &[
            step(&[0], 1),
            step(&[1], 1),
            step(&[0], 2),
            step(&[0], 2),
            // The window layer has none of these positions.
            Copy { source: 0, target: 1, start: 1, end: 3 },
            step(&[1], 1),
        ],
    );
}

#[test]
fn a_second_copy_does_not_restore_dropped_positions() {
    replay(
        with_window(60, 2, 2, 0),
        &[
            step(&[0], 2),
            step(&[0], 2),
            Copy { source: 0, target: 1, start: 0, end: i32::MAX },
            step(&[1], 2),
            step(&[1], 2),
            step(&[1], 2),
            // The three positions before these four have been removed.
            Copy { source: 0, target: 1, start: 0, end: i32::MAX },
            Remove { sequence: 1, start: 6, end: i32::MAX },
            step(&[1], 1),
        ],
    );
}

#[test]
fn a_window_moves_nothing_onto_a_tree_without_a_sequence() {
    replay(
        with_window(30, 2, 3, 0),
        &[
            Propose { sequence: 1, parents: vec![0] },
            Undeclared { n: 1, abort: false },
            step(&[0], 2),
            step(&[0], 2),
            step(&[0], 2),
            step(&[0], 2),
            Propose { sequence: 1, parents: vec![i32::MAX] },
            Undeclared { n: 1, abort: false },
        ],
    );
}
