//! What generated operations found once.

use super::cells::{replay, Config, Op::*};

#[test]
fn a_step_hides_its_own_tokens_behind_the_window() {
    replay(
        Config { capacity: 30, max_step: 7, windows: vec![(1, 4)] },
        &[
            Step { sequences: vec![0], n: 3, in_turns: true, abort: false },
            Step { sequences: vec![0], n: 3, in_turns: true, abort: false },
        ],
    );
}

#[test]
fn a_copy_may_end_long_before_the_window() {
    replay(
        Config { capacity: 30, max_step: 2, windows: vec![(1, 0)] },
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
        Config { capacity: 8, max_step: 1, windows: vec![(20, 0)] },
        &[
            Propose { sequence: 2, parents: vec![538, 508] },
            Remove { sequence: 2, start: 0, end: 550 },
        ],
    );
}

#[test]
fn compaction_puts_trees_behind_their_sequences() {
    replay(
        Config { capacity: 30, max_step: 2, windows: vec![] },
        &[
            Step { sequences: vec![1, 0], n: 1, in_turns: false, abort: false },
            Step { sequences: vec![1], n: 1, in_turns: false, abort: false },
            Propose { sequence: 1, parents: vec![808, 501, 56, 625, 874] },
            Undeclared { n: 2, abort: false },
            Compact,
        ],
    );
}
