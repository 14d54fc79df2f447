//! Cases that generated operations have found, and cases that they reach only rarely.

use etkv_core::LayerPolicy;

use super::cells::{replay, Config, Op::*};

#[test]
fn a_step_hides_its_own_tokens_outside_the_window() {
    replay(
        Config {
            capacity: 30,
            max_step_tokens: 7,
            policies: vec![LayerPolicy::Window { window: 1, sinks: 4 }],
        },
        &[
            Step { sequences: vec![0], n: 3, in_turns: true, abort: false },
            Step { sequences: vec![0], n: 3, in_turns: true, abort: false },
        ],
    );
}

#[test]
fn a_copy_may_end_long_before_the_window() {
    replay(
        Config {
            capacity: 30,
            max_step_tokens: 2,
            policies: vec![LayerPolicy::Window { window: 1, sinks: 0 }],
        },
        &[
            Step { sequences: vec![21, 1], n: 1, in_turns: true, abort: false },
            Step { sequences: vec![0, 1], n: 1, in_turns: false, abort: false },
            Step { sequences: vec![0], n: 2, in_turns: false, abort: false },
            Step { sequences: vec![0, 1], n: 2, in_turns: true, abort: false },
            Step { sequences: vec![0, 1], n: 2, in_turns: true, abort: false },
            Step { sequences: vec![0, 1], n: 2, in_turns: true, abort: false },
            Copy { source: 0, target: 21, start: 127, end: 964 },
            Step { sequences: vec![21], n: 1, in_turns: false, abort: false },
        ],
    );
}

#[test]
fn nothing_removed_keeps_the_tree() {
    replay(
        Config {
            capacity: 8,
            max_step_tokens: 1,
            policies: vec![LayerPolicy::Window { window: 20, sinks: 0 }],
        },
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
            Step { sequences: vec![1, 0], n: 1, in_turns: false, abort: false },
            Step { sequences: vec![1], n: 1, in_turns: false, abort: false },
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
            Step { sequences: vec![0], n: 3, in_turns: false, abort: false },
            Step { sequences: vec![1], n: 1, in_turns: false, abort: false },
            Step { sequences: vec![2], n: 1, in_turns: false, abort: false },
            Propose { sequence: 0, parents: vec![0] },
            Undeclared { n: 1, abort: false },
            Step { sequences: vec![3], n: 1, in_turns: false, abort: false },
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
        Config {
            capacity: 30,
            max_step_tokens: 2,
            policies: vec![LayerPolicy::Window { window: 1, sinks: 0 }],
        },
        &[
            Step { sequences: vec![0], n: 1, in_turns: false, abort: false },
            Step { sequences: vec![1], n: 1, in_turns: false, abort: false },
            Step { sequences: vec![0], n: 2, in_turns: false, abort: false },
            Step { sequences: vec![0], n: 2, in_turns: false, abort: false },
            // The window layer has none of these positions.
            Copy { source: 0, target: 1, start: 1, end: 3 },
            Step { sequences: vec![1], n: 1, in_turns: false, abort: false },
        ],
    );
}

#[test]
fn a_second_copy_does_not_restore_dropped_positions() {
    replay(
        Config {
            capacity: 60,
            max_step_tokens: 2,
            policies: vec![LayerPolicy::Window { window: 2, sinks: 0 }],
        },
        &[
            Step { sequences: vec![0], n: 2, in_turns: false, abort: false },
            Step { sequences: vec![0], n: 2, in_turns: false, abort: false },
            Copy { source: 0, target: 1, start: 0, end: i32::MAX },
            Step { sequences: vec![1], n: 2, in_turns: false, abort: false },
            Step { sequences: vec![1], n: 2, in_turns: false, abort: false },
            Step { sequences: vec![1], n: 2, in_turns: false, abort: false },
            // The three positions before these four have been removed.
            Copy { source: 0, target: 1, start: 0, end: i32::MAX },
            Remove { sequence: 1, start: 6, end: i32::MAX },
            Step { sequences: vec![1], n: 1, in_turns: false, abort: false },
        ],
    );
}

#[test]
fn a_window_moves_nothing_onto_a_tree_without_a_sequence() {
    let step = || Step { sequences: vec![0], n: 2, in_turns: false, abort: false };
    replay(
        Config {
            capacity: 30,
            max_step_tokens: 2,
            policies: vec![LayerPolicy::Window { window: 3, sinks: 0 }],
        },
        &[
            Propose { sequence: 1, parents: vec![0] },
            Undeclared { n: 1, abort: false },
            step(),
            step(),
            step(),
            step(),
            Propose { sequence: 1, parents: vec![i32::MAX] },
            Undeclared { n: 1, abort: false },
        ],
    );
}
