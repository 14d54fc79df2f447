//! The cells that the queries of a step see in a layer group: a run without a mask if possible, otherwise a mask over
//! cells.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::group::LayerGroup;
use super::runs::{Run, Runs};
use super::segments::Segments;
use super::tree::Tree;
use super::CellsBookkeeping;
use crate::bookkeeping::{LayerGroupPlan, MaskPlan, MaskRuns, Slots};
use crate::error::Result;

impl CellsBookkeeping {
    /// Returns the plan of one layer group for tokens with these positions and cells.
    ///
    /// # Errors
    /// [`Capacity`](crate::Status::Capacity) for a mask that is too large.
    pub(super) fn group_plan(
        &self,
        group: usize,
        segments: &Segments,
        positions: &[i32],
        cells: &[i32],
    ) -> Result<LayerGroupPlan> {
        let write = Slots::of(cells);
        let single = segments
            .only_member()
            .and_then(|sequence| self.single(group, sequence, positions, &write));
        if let Some(read) = single {
            let mask = if positions.len() == 1 { MaskPlan::None } else { MaskPlan::Causal };
            return Ok(LayerGroupPlan { write, read, mask });
        }
        let (read, mask) = self.explicit(group, segments, positions, cells)?;
        Ok(LayerGroupPlan { write, read, mask: MaskPlan::Explicit(Arc::new(mask)) })
    }

    /// Returns the cells that the step reads, if a causal mask suffices. The step's tokens must belong to one
    /// sequence, or to the sequence's chain of candidates. Their cells must be one run, and the last query must see
    /// all of it.
    fn single(
        &self,
        group: usize,
        sequence: i32,
        positions: &[i32],
        write: &Slots,
    ) -> Option<Range<i32>> {
        let nodes: &[i32] = match self.trees.get(&sequence) {
            None => &[],
            Some(tree) if tree.is_chain() => &tree.cells[group],
            Some(_) => return None,
        };
        let Slots::Run(write) = write else {
            return None;
        };
        let held = &self.groups[group].held(sequence);
        if !held.is_contiguous() {
            return None;
        }
        let start = match (held.count(), nodes.first()) {
            (0, Some(&node)) => node,
            (0, None) => write.start,
            _ => held.extent().start,
        };
        let after = start + held.count();
        let follow = nodes.iter().zip(after..).all(|(&node, cell)| node == cell);
        if !follow || write.start != after + nodes.len() as i32 {
            return None;
        }
        let (&first, &last) = (positions.first()?, positions.last()?);
        let Some(window) = self.groups[group].window else {
            return Some(start..write.end);
        };
        let seen = window.first_seen(last);
        // The last query does not see these positions. The sequence must have none of them, and this step must add
        // none.
        let unseen = window.sinks()..seen;
        let first_fresh = (first - nodes.len() as i32).max(unseen.start);
        if held.clipped(unseen.clone()).next().is_none() && first_fresh >= unseen.end {
            return Some(start..write.end);
        }
        // A single query's window is one run if the positions are in order.
        let in_order = held.n_runs() == 1 && nodes.is_empty() && window.sinks() == 0;
        // A sequence that was copied may end long before the window begins.
        let hidden = (seen - held.first()?).min(held.count());
        (positions.len() == 1 && in_order).then(|| start + hidden..write.end)
    }

    /// Returns the range of cells that the step reads, and a mask of the cells that each token sees.
    fn explicit(
        &self,
        group: usize,
        segments: &Segments,
        positions: &[i32],
        cells: &[i32],
    ) -> Result<(Range<i32>, MaskRuns)> {
        let state = &self.groups[group];
        let read = self.extent(group, segments, positions, cells);
        let mut mask = MaskRuns::new(cells.len(), read.len())?;
        let mut tokens = cells.iter().zip(positions);
        let mut fresh: BTreeMap<i32, Runs> = BTreeMap::new();
        let mut nodes: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
        for (members, n_tokens) in segments.iter() {
            for _ in 0..n_tokens {
                let Some((&cell, &position)) = tokens.next() else {
                    break;
                };
                let mut row = Row { mask: &mut mask, start: read.start };
                for &sequence in members {
                    let seen = QueryView { group: state, position };
                    seen.mark(state.held(sequence), &mut row)?;
                    if let Some(tree) = self.trees.get(&sequence) {
                        let nodes = nodes.entry(sequence).or_default();
                        seen.mark_chain(tree, &tree.cells[group], nodes, &mut row)?;
                        nodes.push(cell);
                    } else {
                        let fresh = fresh.entry(sequence).or_default();
                        seen.mark(fresh, &mut row)?;
                        fresh.push(Run { position, cell, len: 1 });
                    }
                }
                row.see(cell..cell + 1)?;
                mask.end_query();
            }
        }
        Ok((read, mask))
    }

    /// Returns the range from the first to the last cell that the step may see. The range does not depend on other
    /// sequences. Attention groups its sums by the offset of a key in this range, so equal keys in equal order give
    /// equal sums.
    fn extent(
        &self,
        group: usize,
        segments: &Segments,
        positions: &[i32],
        cells: &[i32],
    ) -> Range<i32> {
        let state = &self.groups[group];
        let (mut start, mut end) = (i32::MAX, 0);
        let mut widen = |cells: Range<i32>| {
            if !cells.is_empty() {
                (start, end) = (start.min(cells.start), end.max(cells.end));
            }
        };
        let mut tokens = positions;
        for (members, n_tokens) in segments.iter() {
            let (own, others) = tokens.split_at(tokens.len().min(n_tokens));
            tokens = others;
            for &sequence in members {
                let held = state.held(sequence);
                match own.iter().min().filter(|_| state.window.is_some()) {
                    Some(&position) => {
                        for range in (QueryView { group: state, position }).ranges(i32::MAX) {
                            held.clipped(range).for_each(|run| widen(run.cells()));
                        }
                    }
                    None => widen(held.extent()),
                }
                if let Some(tree) = self.trees.get(&sequence) {
                    tree.cells[group].iter().for_each(|&cell| widen(cell..cell + 1));
                }
            }
        }
        cells.iter().for_each(|&cell| widen(cell..cell + 1));
        start..end
    }
}

/// One token's row of the mask. Its first column is the cell `start`.
struct Row<'a> {
    mask: &'a mut MaskRuns,
    start: i32,
}

impl Row<'_> {
    fn see(&mut self, cells: Range<i32>) -> Result<()> {
        self.mask.see(cells.start - self.start..cells.end - self.start)
    }
}

/// The position of a query and its layer group. They determine which positions the query sees.
struct QueryView<'a> {
    group: &'a LayerGroup,
    position: i32,
}

impl QueryView<'_> {
    fn mark(&self, runs: &Runs, row: &mut Row) -> Result<()> {
        for range in self.ranges(self.position + 1) {
            runs.clipped(range).try_for_each(|run| row.see(run.cells()))?;
        }
        Ok(())
    }

    /// Returns the positions up to `end` that the query sees: the sinks, and its window.
    fn ranges(&self, end: i32) -> [Range<i32>; 2] {
        let (sinks, first) = match self.group.window {
            None => (0, 0),
            Some(window) => (window.sinks(), window.first_seen(self.position)),
        };
        [0..sinks.min(first), first..end]
    }

    /// Marks the ancestors of the next node of `tree`. The nodes of `written` got their cells in earlier steps, and
    /// the nodes of `fresh` in this step.
    fn mark_chain(&self, tree: &Tree, written: &[i32], fresh: &[i32], row: &mut Row) -> Result<()> {
        let node = written.len() + fresh.len();
        let base = self.position - tree.depth(node);
        for ancestor in tree.chain_up(node).skip(1) {
            let position = base + tree.depth(ancestor);
            let is_seen = self.group.window.is_none_or(|window| {
                position < window.sinks() || position >= window.first_seen(self.position)
            });
            if is_seen {
                let cell = match written.get(ancestor) {
                    Some(&cell) => cell,
                    None => fresh[ancestor - written.len()],
                };
                row.see(cell..cell + 1)?;
            }
        }
        Ok(())
    }
}
