//! A pool of cells that many sequences share. A cell holds one position and
//! belongs to a set of sequences: forks share cells, and a cell is free when its
//! last owner leaves it.
//!
//! The first layer group holds every position of every sequence; it says what is there.
//! The others hold what their windows need.

mod block;
mod compact;
mod group;
mod layout;
mod mask;
mod occupancy;
mod runs;
mod segments;
mod sequences;
mod step;
mod tree;

use std::collections::BTreeMap;
use std::ops::Range;

use super::{LayerGroupPlan, Window};
use crate::error::{fail, Result};
use group::LayerGroup;
use segments::Segments;
use step::OpenStep;
use tree::Tree;

/// Sequences have numbers from 0 to one less than this.
pub const MAX_SEQUENCES: i32 = 256;

/// Sequences, and trees of candidates behind them, in `capacity` cells.
#[derive(Debug, Clone)]
pub struct CellsBookkeeping {
    capacity: i32,
    /// The first has full history.
    groups: Vec<LayerGroup>,
    trees: BTreeMap<i32, Tree>,
    /// Whose tokens the next step has, where somebody said so.
    declared: Option<Segments>,
    step: Option<OpenStep>,
    /// What the open step does to each layer group, and the cells and positions of its
    /// tokens. The lists are kept from step to step for their memory; masks are
    /// made anew, since that of a long prompt would be held for good.
    plans: Vec<LayerGroupPlan>,
    cells: Vec<Vec<i32>>,
    positions: Vec<i32>,
}

impl CellsBookkeeping {
    /// Empty, with a layer group for each window besides the one of full history.
    pub fn new(capacity: i32, windows: impl IntoIterator<Item = Window>) -> Self {
        let windows = std::iter::once(None).chain(windows.into_iter().map(Some));
        let groups: Vec<LayerGroup> =
            windows.map(|window| LayerGroup::new(window, capacity)).collect();
        let cells = vec![Vec::new(); groups.len()];
        Self {
            capacity,
            groups,
            trees: BTreeMap::new(),
            declared: None,
            step: None,
            plans: Vec::new(),
            cells,
            positions: Vec::new(),
        }
    }

    fn full(&self) -> &LayerGroup {
        &self.groups[0]
    }

    /// The most cells.
    pub fn capacity(&self) -> i32 {
        self.capacity
    }

    /// Cells that are taken in the layer group of full history. An open step's are not
    /// before it is committed.
    pub fn length(&self) -> i32 {
        self.taken(0)
    }

    /// Cells of a layer group that are taken, without those of the open step.
    fn taken(&self, group: usize) -> i32 {
        let planned = if self.step.is_some() { self.cells[group].len() as i32 } else { 0 };
        self.groups[group].taken() - planned
    }

    /// Whether `n` more tokens fit; negative `n` never do.
    pub fn can_extend(&self, n: i32) -> bool {
        n >= 0 && n <= self.capacity - self.length()
    }

    /// Positions of one layer group that its sequences are promised to hold. The layer group of
    /// full history is 0, that of the first window 1.
    ///
    /// # Panics
    /// For a layer group that there is not.
    pub fn used(&self, group: usize) -> i32 {
        let (state, taken) = (&self.groups[group], self.taken(group));
        let Some(window) = state.window else {
            return taken;
        };
        let promised = |sequence| i64::from(window.held(state.held(sequence).count()));
        let nodes: i64 = self.trees.values().map(|tree| tree.n_written() as i64).sum();
        let all: i64 = state.owners().map(promised).sum();
        // `taken` is an i32, so the least of the two is one as well.
        (all + nodes).min(i64::from(taken)) as i32
    }

    /// Sequences that hold positions, or carry trees.
    pub fn sequences(&self) -> Vec<i32> {
        let mut all: Vec<i32> = self.full().owners().chain(self.trees.keys().copied()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The sequence that there is, where there is at most one: 0 where there is
    /// none.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) where there are several.
    pub fn only_sequence(&self) -> Result<i32> {
        let mut live = self.full().owners().chain(self.trees.keys().copied());
        let only = live.next().unwrap_or(0);
        if live.any(|other| other != only) {
            fail!(
                InvalidArgument,
                "the cache holds {} sequences, and nothing says which is meant",
                self.sequences().len()
            );
        }
        Ok(only)
    }

    /// Positions that a sequence holds.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a number that no
    /// sequence has, as everywhere below.
    pub fn seq_len(&self, sequence: i32) -> Result<i32> {
        check_sequence(sequence)?;
        Ok(self.full().held(sequence).count())
    }

    /// The position of a sequence's next token: one past its last. After a removal
    /// at the front that is more than it holds.
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

    /// The positions that a sequence holds, as ranges in order.
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

    /// Whether a sequence alone is read without a mask in the layer group of full
    /// history: its cells are one run, in any order.
    ///
    /// # Errors
    /// As [`seq_len`](Self::seq_len).
    pub fn is_contiguous(&self, sequence: i32) -> Result<bool> {
        check_sequence(sequence)?;
        Ok(self.full().held(sequence).is_contiguous())
    }

    /// Forgets every sequence and every tree, and a step that is open.
    pub fn clear(&mut self) {
        self.groups.iter_mut().for_each(LayerGroup::clear);
        self.trees.clear();
        self.declared = None;
        // Its cells are free again, so that there is nothing to commit or abort.
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
            "there is no sequence {sequence}: they have numbers from 0 to {}",
            MAX_SEQUENCES - 1
        );
    }
    Ok(())
}
