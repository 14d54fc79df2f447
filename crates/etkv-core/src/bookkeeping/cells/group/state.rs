//! Converts the cells of a layer group to their state in a file, and back.

use super::{LayerGroup, Run};
use crate::bookkeeping::cells::{MAX_CHECKPOINTS, MAX_SEQUENCES};
use crate::error::{fail, Error, Result, Status};
use crate::snapshot::{damaged, GroupState, SequenceState};

/// The maximum number of positions of a sequence in a file. Twice this number fits in an i32.
const MAX_POSITIONS: i32 = 1 << 30;

/// In a file of at most this number of cells, any number of them may be empty.
const MAX_SPARSE: usize = 1 << 22;

/// The maximum number of cells for each position in larger files. The bookkeeping uses two bytes for each cell, even
/// for an empty one.
const MAX_CELLS_A_ROW: i64 = 64;

impl LayerGroup {
    /// Returns the state, without the cells of trees.
    pub fn state(&self) -> GroupState {
        let sequence = |sequence: i32| SequenceState {
            sequence,
            runs: self.held(sequence).iter().map(|run| [run.position, run.cell, run.len]).collect(),
        };
        GroupState { size: self.size, sequences: self.owners().map(sequence).collect() }
    }

    /// Returns the cells that sequences and trees own, in order.
    pub fn owned_cells(&self) -> Vec<i32> {
        (0..).zip(&self.owners).filter(|(_, &n)| n > 0).map(|(cell, _)| cell).collect()
    }

    /// Returns a layer group with the same parameters, the contents of `state`, and the cells of trees in `nodes`.
    ///
    /// # Errors
    /// [`File`](Status::File) for cells that do not fit or contradict each other, [`Backend`](Status::Backend)
    /// if there is too little memory.
    pub fn with_state(&self, state: &GroupState, nodes: &[i32]) -> Result<Self> {
        let mut group = self.emptied();
        if self.window.is_some() {
            let (size, least, most) = (state.size, group.size, self.capacity);
            if size < least || size > most {
                fail!(File, "the file has {size} cells of a window, expected {least} to {most}");
            }
        }
        // Layers with full history and recurrent layers may use all cells, whatever the capacity of the cache that
        // was saved.
        group.size = state.size.clamp(group.size, self.capacity);
        let mut all: Vec<Run> = Vec::new();
        let mut before = -1;
        for SequenceState { sequence, runs } in &state.sequences {
            if !(0..MAX_SEQUENCES + MAX_CHECKPOINTS).contains(sequence) {
                return Err(damaged(format_args!("a sequence has the number {sequence}")));
            }
            if *sequence <= before {
                return Err(damaged(format_args!("sequence {sequence} follows {before}")));
            }
            before = *sequence;
            check_runs(*sequence, runs)?;
            all.extend(runs.iter().map(|&[position, cell, len]| Run { position, cell, len }));
        }
        let n_held: i64 = all.iter().map(|run| i64::from(run.len)).sum();
        let end = group.check_cells(all, nodes)?;
        if end > MAX_SPARSE && end as i64 / MAX_CELLS_A_ROW > n_held + nodes.len() as i64 {
            fail!(
                File,
                "the file has {n_held} positions in cells up to {end}; compact the cache before \
                 it is saved"
            );
        }
        if group.owners.try_reserve_exact(end).is_err() {
            return Err(Error::new(
                Status::Backend,
                format_args!("out of memory: {end} cells; free memory"),
            ));
        }
        for SequenceState { sequence, runs } in &state.sequences {
            for &[position, cell, len] in runs {
                let run = Run { position, cell, len };
                group.own(&run);
                group.held_mut(*sequence).push(run);
            }
        }
        nodes.iter().for_each(|&cell| group.own_as_node(cell));
        for cell in group.owned_cells() {
            group.occupancy.take(cell);
        }
        Ok(group)
    }

    /// Checks that the cells exist, and that each has one position or one node. Returns the number of cells up to the
    /// last one.
    fn check_cells(&self, runs: Vec<Run>, nodes: &[i32]) -> Result<usize> {
        // The difference between a position and its cell: it is the same in a whole run. `None` for a node.
        let shifted = runs.iter().map(|run| (run.cell, run.len, Some(run.position)));
        let mut all: Vec<(i32, i32, Option<i32>)> =
            shifted.chain(nodes.iter().map(|&cell| (cell, 1, None))).collect();
        drop(runs);
        all.sort_unstable();
        let (mut end, mut before) = (0, None);
        for (cell, len, position) in all {
            let after = cell.checked_add(len).filter(|&after| cell >= 0 && after <= self.size);
            let Some(after) = after else {
                fail!(
                    File,
                    "the file has {len} cells starting at {cell}, but this cache has {}; \
                     create it with the file's capacity",
                    self.size
                );
            };
            let shift = position.map(|position| position - cell);
            if cell < end && (shift.is_none() || shift != before) {
                return Err(damaged(format_args!("cell {cell} holds two positions")));
            }
            (end, before) = (end.max(after), shift);
        }
        // `end` is at most the size, an i32.
        Ok(end as usize)
    }
}

/// Checks that the runs of a sequence are in the order of their positions.
fn check_runs(sequence: i32, runs: &[[i32; 3]]) -> Result<()> {
    if runs.is_empty() {
        return Err(damaged(format_args!("sequence {sequence} has no positions")));
    }
    let mut next = 0;
    for &[position, _, len] in runs {
        let end = position.checked_add(len).filter(|&end| end <= MAX_POSITIONS);
        match end {
            Some(end) if position >= next && len >= 1 => next = end,
            _ => {
                return Err(damaged(format_args!(
                    "expected the next {len} positions of sequence {sequence} to start at {next}, got {position}"
                )))
            }
        }
    }
    Ok(())
}
