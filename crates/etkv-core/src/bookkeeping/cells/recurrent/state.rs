//! Converts the rows and anchors of recurrent layers to their state in a file, and back.

use std::collections::BTreeMap;

use super::Recurrent;
use crate::bookkeeping::cells::runs::Runs;
use crate::bookkeeping::cells::tree::Tree;
use crate::bookkeeping::recurrent::BLOCK;
use crate::error::Result;
use crate::snapshot::{damaged, RecurrentState};

impl Recurrent {
    /// Returns the state, without trees.
    pub fn state(&self) -> RecurrentState {
        RecurrentState { rows: self.rows.state(), anchors: self.anchors.state() }
    }

    /// Returns bookkeeping with the parameters of `self`, and the contents of `state` and `trees`.
    ///
    /// # Errors
    /// [`File`](crate::Status::File) for cells that do not fit or contradict each other.
    pub fn with_state(&self, state: &RecurrentState, trees: &BTreeMap<i32, Tree>) -> Result<Self> {
        if trees.values().any(|tree| tree.rows.len() != tree.n_written()) {
            return Err(damaged("a tree lacks rows of recurrent layers"));
        }
        let rows: Vec<i32> = trees.values().flat_map(|tree| tree.rows.iter().copied()).collect();
        let anchors: Vec<i32> =
            trees.values().flat_map(|tree| tree.anchors.values().copied()).collect();
        let mut empty = Self::new(self.window, self.capacity);
        empty.rows = empty.rows.with_state(&state.rows, &rows)?;
        empty.anchors = empty.anchors.with_state(&state.anchors, &anchors)?;
        Ok(empty)
    }

    /// Moves rows and anchors to the first slots, and keeps their order.
    pub fn pack(&mut self, trees: &mut BTreeMap<i32, Tree>) {
        for (group, is_rows) in [(&mut self.rows, true), (&mut self.anchors, false)] {
            let targets: BTreeMap<i32, i32> = group.owned_cells().into_iter().zip(0..).collect();
            let target = |cell: i32| targets.get(&cell).copied().unwrap_or(cell);
            group.remap(target);
            group.shrink();
            for tree in trees.values_mut() {
                if is_rows {
                    tree.rows.iter_mut().for_each(|cell| *cell = target(*cell));
                } else {
                    tree.anchors.values_mut().for_each(|slot| *slot = target(*slot));
                }
            }
        }
    }

    /// Returns whether `owner` has all rows and anchors that determine its states after `next` positions, and after
    /// every earlier position back to its oldest anchor.
    pub fn is_whole(&self, owner: i32, next: i32) -> bool {
        let mut base = next / BLOCK * BLOCK;
        if base == next && !self.has_anchor(owner, base) {
            base = (base - BLOCK).max(0);
        }
        let (rows, anchors) = (self.rows.held(owner), self.anchors.held(owner));
        let oldest = anchors.first().map_or(0, |block| block.saturating_mul(BLOCK));
        let first = (base.min(oldest) - self.window.lead).max(0);
        let n: i32 = rows.clipped(first..next).map(|run| run.len).sum();
        let ordered =
            anchors.first().is_none_or(|block| block > 0) && anchors.next() <= next / BLOCK + 1;
        let has_gaps =
            |runs: &Runs| runs.first().is_some_and(|first| runs.next() - first != runs.count());
        // If no rows have been dropped, every position must be reachable.
        let reaches = rows.first() != Some(0) || anchors.first().is_none_or(|block| block == 1);
        let whole = !has_gaps(rows) && !has_gaps(anchors) && reaches;
        self.has_anchor(owner, base) && n == next - first && rows.next() <= next && ordered && whole
    }
}
