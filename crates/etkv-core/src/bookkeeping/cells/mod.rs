//! A pool of cells that many sequences share. A cell has one position and belongs to a set of sequences. Forks share
//! cells. A cell is free when no sequence owns it.
//!
//! The first layer group has every position of every sequence. The others have the positions in their windows.

mod block;
mod checkpoints;
mod compact;
mod group;
mod layout;
mod mask;
mod occupancy;
mod one_sequence;
mod recurrent;
mod runs;
mod segments;
mod sequences;
mod state;
mod step;
mod tree;
mod undo;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::{LayerGroupPlan, RecurrentPlan, Slots, Window};
use crate::error::{fail, Result};
use checkpoints::Checkpoints;
use checkpoints::MAX_CHECKPOINTS;
use group::LayerGroup;
use recurrent::Recurrent;
pub use recurrent::RecurrentWindow;
use segments::Segments;
use step::OpenStep;
use tree::Tree;
pub use undo::AddedStep;

/// The number of sequences, which are numbered from 0.
pub const MAX_SEQUENCES: i32 = 256;

/// Sequences, and trees of candidates after them, in `capacity` cells.
#[derive(Debug, Clone)]
pub struct CellsBookkeeping {
    capacity: i32,
    /// The first group has full history.
    groups: Vec<LayerGroup>,
    /// The rows and anchors of recurrent layers, if the model has any.
    recurrent: Option<Recurrent>,
    checkpoints: Checkpoints,
    trees: BTreeMap<i32, Tree>,
    /// The sequences of the next step's tokens, if they have been declared.
    declared: Option<Segments>,
    step: Option<OpenStep>,
    /// The open step's plan for each layer group, and the cells and positions of its tokens. The lists keep their
    /// memory from step to step. Masks do not: the mask of a long prompt would stay in memory for as long as the
    /// cache exists.
    plans: Vec<LayerGroupPlan>,
    cells: Vec<Vec<i32>>,
    positions: Vec<i32>,
}

impl CellsBookkeeping {
    /// Returns empty bookkeeping, with a layer group of full history and a layer group for each window.
    pub fn new(capacity: i32, windows: impl IntoIterator<Item = Window>) -> Self {
        let windows = std::iter::once(None).chain(windows.into_iter().map(Some));
        let groups: Vec<LayerGroup> =
            windows.map(|window| LayerGroup::new(window, capacity)).collect();
        let cells = vec![Vec::new(); groups.len()];
        Self {
            capacity,
            groups,
            recurrent: None,
            checkpoints: Checkpoints::new(0),
            trees: BTreeMap::new(),
            declared: None,
            step: None,
            plans: Vec::new(),
            cells,
            positions: Vec::new(),
        }
    }

    /// Adds recurrent layers, and room for `checkpoints` checkpoints, to an empty cache.
    pub fn with_recurrent(self, window: Option<RecurrentWindow>, checkpoints: i32) -> Self {
        let recurrent = window.map(|window| Recurrent::new(window, self.capacity));
        Self { recurrent, checkpoints: Checkpoints::new(checkpoints), ..self }
    }

    /// Returns the plan of the open step for the recurrent layers, if the model has any.
    pub fn recurrent_plan(&self) -> Option<&Arc<RecurrentPlan>> {
        self.recurrent.as_ref().and_then(Recurrent::open_plan)
    }

    /// Returns the plans of the open step for the rows and the anchors of recurrent layers.
    pub fn recurrent_buffers(&self) -> &[LayerGroupPlan] {
        self.plans().get(self.groups.len()..).unwrap_or_default()
    }

    /// Returns the cells of `cells` that sequences or trees own.
    ///
    /// # Panics
    /// If the layer group does not exist.
    pub fn held_among(&self, group: usize, cells: &Slots) -> Slots {
        let held = self.cells_of(group);
        Slots::of(&cells.iter().filter(|&cell| held.n_owners(cell) > 0).collect::<Vec<_>>())
    }

    /// Returns the cells of a layer group. The rows and the anchors of recurrent layers follow the groups of
    /// attention.
    ///
    /// # Panics
    /// If the layer group does not exist.
    fn cells_of(&self, group: usize) -> &LayerGroup {
        match (&self.recurrent, group.checked_sub(self.groups.len())) {
            (Some(recurrent), Some(0)) => &recurrent.rows,
            (Some(recurrent), Some(1)) => &recurrent.anchors,
            _ => &self.groups[group],
        }
    }

    fn full(&self) -> &LayerGroup {
        &self.groups[0]
    }

    /// Returns the number of cells.
    pub fn capacity(&self) -> i32 {
        self.capacity
    }

    /// Returns the number of taken cells in the layer group of full history. The cells of an open step count after
    /// its commit.
    pub fn length(&self) -> i32 {
        self.taken(0)
    }

    /// Returns the number of taken cells in a layer group, without the cells of the open step.
    fn taken(&self, group: usize) -> i32 {
        let planned = match (&self.recurrent, group.checked_sub(self.groups.len())) {
            (Some(recurrent), Some(buffer)) => recurrent.n_planned()[buffer],
            _ if self.step.is_some() => self.cells[group].len() as i32,
            _ => 0,
        };
        self.cells_of(group).taken() - planned
    }

    /// Returns whether `n` more tokens fit; false for a negative `n`.
    pub fn can_extend(&self, n: i32) -> bool {
        n >= 0 && n <= self.capacity - self.length()
    }

    /// Returns the number of positions that a layer group guarantees to keep for its sequences. Layer group 0 has
    /// full history, and 1 has the first window. The last two groups are the rows and the anchors of recurrent
    /// layers.
    ///
    /// # Panics
    /// If the layer group does not exist.
    pub fn used(&self, group: usize) -> i32 {
        let (state, taken) = (self.cells_of(group), self.taken(group));
        let Some(window) = state.window else {
            return taken;
        };
        let promised = |owner| {
            let held = state.held(owner);
            if !window.slides() {
                return i64::from(held.count());
            }
            let sinks = window.sinks();
            let first = window.first_needed(held.next()).max(sinks);
            let kept = held.clipped(0..sinks).chain(held.clipped(first..i32::MAX));
            kept.map(|run| i64::from(run.len)).sum()
        };
        let nodes: i64 = self.trees.values().map(|tree| tree.n_written() as i64).sum();
        let all: i64 = state.owners().map(promised).sum();
        // At most `taken`, which is an i32.
        (all + nodes).min(i64::from(taken)) as i32
    }

    /// Returns the sequences that have positions or trees.
    pub fn sequences(&self) -> Vec<i32> {
        let mut all: Vec<i32> = self.full().owners().chain(self.trees.keys().copied()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Returns the only sequence, or 0 if the cache is empty. `otherwise` is the advice in the error message.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if there are several sequences.
    pub fn only_sequence(&self, otherwise: &str) -> Result<i32> {
        let mut live = self.full().owners().chain(self.trees.keys().copied());
        let only = live.next().unwrap_or(0);
        if live.any(|other| other != only) {
            fail!(
                InvalidArgument,
                "the cache holds {} sequences; {otherwise}",
                self.sequences().len()
            );
        }
        Ok(only)
    }

    /// Returns the number of positions of a sequence.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a sequence number out of range, as in all functions
    /// below.
    pub fn seq_len(&self, sequence: i32) -> Result<i32> {
        check_sequence(sequence)?;
        Ok(self.full().held(sequence).count())
    }

    /// Returns the position of a sequence's next token: its last position plus 1. If its first positions were
    /// removed, this is more than the number of its positions.
    ///
    /// # Errors
    /// As [`seq_len`](Self::seq_len).
    pub fn seq_next(&self, sequence: i32) -> Result<i32> {
        check_sequence(sequence)?;
        Ok(self.next(sequence))
    }

    fn next(&self, sequence: i32) -> i32 {
        self.full().held(sequence).next()
    }

    /// Returns the positions of a sequence, as ranges in order.
    ///
    /// # Errors
    /// As [`seq_len`](Self::seq_len).
    pub fn seq_positions(&self, sequence: i32) -> Result<Vec<Range<i32>>> {
        check_sequence(sequence)?;
        let mut ranges: Vec<Range<i32>> = Vec::new();
        for run in self.full().held(sequence).iter() {
            match ranges.last_mut() {
                Some(last) if last.end == run.position => last.end += run.len,
                _ => ranges.push(run.positions()),
            }
        }
        Ok(ranges)
    }

    /// Returns whether attention can read this sequence without a mask in the layer group of full history. It can if
    /// the sequence's cells are one run, in any order.
    ///
    /// # Errors
    /// As [`seq_len`](Self::seq_len).
    pub fn is_contiguous(&self, sequence: i32) -> Result<bool> {
        check_sequence(sequence)?;
        Ok(self.full().held(sequence).is_contiguous())
    }

    /// Removes all sequences, trees and checkpoints, and the open step.
    pub fn clear(&mut self) {
        self.groups.iter_mut().for_each(LayerGroup::clear);
        self.recurrent.iter_mut().for_each(Recurrent::clear);
        self.checkpoints.clear();
        self.trees.clear();
        self.declared = None;
        // The cells of the step are already free.
        self.step = None;
    }

    fn refuse_in_step(&self, what: &str) -> Result<()> {
        if self.step.is_some() {
            fail!(Step, "cannot {what} in the middle of a step");
        }
        Ok(())
    }
}

fn check_sequence(sequence: i32) -> Result<()> {
    if !(0..MAX_SEQUENCES).contains(&sequence) {
        fail!(
            InvalidArgument,
            "expected a sequence from 0 to {}, got {sequence}",
            MAX_SEQUENCES - 1
        );
    }
    Ok(())
}
