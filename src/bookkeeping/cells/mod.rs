//! A pool of cells that many sequences share. A cell holds one position and
//! belongs to a set of sequences: forks share cells, and a cell is free when its
//! last owner leaves it.
//!
//! The first lane holds every position of every sequence; it says what is there.
//! The others hold what their windows need.

mod compact;
mod lane;
mod mask;
mod occupancy;
mod runs;
mod step;
mod tree;

use std::collections::BTreeMap;
use std::ops::Range;

use super::{LanePlan, Move, Slots, Window};
use crate::error::{fail, Result};
use lane::Lane;
use step::{OpenStep, Segments};
use tree::Tree;

/// Sequences have numbers from 0 to one less than this.
pub const MAX_SEQUENCES: i32 = 256;

/// Sequences, and trees of candidates behind them, in `capacity` cells.
#[derive(Debug, Clone)]
pub struct CellsBookkeeping {
    capacity: i32,
    /// The first has full history.
    lanes: Vec<Lane>,
    trees: BTreeMap<i32, Tree>,
    /// Whose tokens the next step has, where somebody said so.
    declared: Option<Segments>,
    step: Option<OpenStep>,
    /// Kept from step to step, for its memory.
    plans: Vec<LanePlan>,
    cells: Vec<Vec<i32>>,
    positions: Vec<i32>,
}

impl CellsBookkeeping {
    /// Empty, with a lane for each window besides the one of full history.
    pub fn new(capacity: i32, windows: impl IntoIterator<Item = Window>) -> Self {
        let windows = std::iter::once(None).chain(windows.into_iter().map(Some));
        let lanes: Vec<Lane> = windows.map(|window| Lane::new(window, capacity)).collect();
        let cells = vec![Vec::new(); lanes.len()];
        Self {
            capacity,
            lanes,
            trees: BTreeMap::new(),
            declared: None,
            step: None,
            plans: Vec::new(),
            cells,
            positions: Vec::new(),
        }
    }

    fn full(&self) -> &Lane {
        &self.lanes[0]
    }

    /// The most cells.
    pub fn capacity(&self) -> i32 {
        self.capacity
    }

    /// Cells that are taken, in the lane of full history.
    pub fn length(&self) -> i32 {
        self.full().taken()
    }

    /// Whether `n` more tokens fit; negative `n` never do.
    pub fn can_extend(&self, n: i32) -> bool {
        n >= 0 && n <= self.capacity - self.length()
    }

    /// Positions of one lane that its sequences are promised to hold.
    pub fn used(&self, lane: usize) -> i32 {
        let state = &self.lanes[lane];
        let Some(window) = state.window else {
            return state.taken();
        };
        let promised = |sequence| i64::from(window.held(state.held(sequence).runs.count()));
        let nodes: i64 = self.trees.values().map(|tree| tree.n_written() as i64).sum();
        let all: i64 = state.owners().map(promised).sum();
        // `taken` is an i32, so the least of the two is one as well.
        (all + nodes).min(i64::from(state.taken())) as i32
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
        Ok(self.full().held(sequence).runs.count())
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
        self.full().held(sequence).runs.next()
    }

    /// The positions that a sequence holds, as ranges in order.
    ///
    /// # Errors
    /// As [`seq_len`](Self::seq_len).
    pub fn seq_positions(&self, sequence: i32) -> Result<Vec<Range<i32>>> {
        check_sequence(sequence)?;
        let mut ranges: Vec<Range<i32>> = Vec::new();
        for run in self.full().held(sequence).runs.iter() {
            match ranges.last_mut() {
                Some(last) if last.end == run.position => last.end += run.len,
                _ => ranges.push(run.positions()),
            }
        }
        Ok(ranges)
    }

    /// The least position, apart from 0, that a sequence can go back to with every
    /// lane holding all that a query there sees.
    ///
    /// # Errors
    /// As [`seq_len`](Self::seq_len).
    pub fn rewindable_to(&self, sequence: i32) -> Result<i32> {
        check_sequence(sequence)?;
        Ok(self.least(sequence))
    }

    fn least(&self, sequence: i32) -> i32 {
        self.lanes.iter().map(|lane| lane.rewindable_to(sequence)).max().unwrap_or(0)
    }

    /// Whether a sequence alone is read without a mask in the lane of full
    /// history: its cells are one run, in any order.
    ///
    /// # Errors
    /// As [`seq_len`](Self::seq_len).
    pub fn is_contiguous(&self, sequence: i32) -> Result<bool> {
        check_sequence(sequence)?;
        Ok(self.full().held(sequence).runs.is_contiguous())
    }

    /// Lets `target` have `source`'s positions from `positions`, too, in the same
    /// cells. `i32::MAX` as the end means all that follow.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument): a sequence or range
    ///   that cannot be.
    /// - [`Position`](crate::Status::Position): `target` has other cells for some
    ///   of these positions, or window lanes have dropped what its next query
    ///   would see.
    /// - [`Step`](crate::Status::Step): a step is open, or `target` carries a tree.
    pub fn seq_cp(&mut self, source: i32, target: i32, positions: Range<i32>) -> Result<()> {
        self.refuse_in_step("copy a sequence")?;
        check_sequence(source)?;
        check_sequence(target)?;
        check_range(&positions)?;
        self.refuse_under_tree(target, "copy onto it")?;
        if source == target {
            return Ok(());
        }
        let (from, to) = (&self.full().held(source).runs, &self.full().held(target).runs);
        let mut copied = from.clipped(positions.clone()).peekable();
        if copied.peek().is_none() {
            return Ok(());
        }
        let mut end = to.next();
        for run in copied {
            end = end.max(run.position + run.len);
            for other in to.clipped(run.positions()) {
                if other.cell - other.position != run.cell - run.position {
                    fail!(
                        Position,
                        "sequence {target} holds a position {} of its own, which sequence \
                         {source} has, too",
                        other.position
                    );
                }
            }
        }
        let least = self.least(source).max(self.least(target));
        if end < least {
            fail!(
                Position,
                "sequence {target} would go on at {end}, but the window layers have dropped \
                 what a query there sees; {least} is the least"
            );
        }
        for lane in &mut self.lanes {
            lane.share(source, target, positions.clone());
        }
        Ok(())
    }

    /// Takes positions from a sequence. Cells that belong to nobody then are free.
    /// `i32::MAX` as the end means all that follow. All of them take its tree away
    /// as well.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument): a sequence or range
    ///   that cannot be.
    /// - [`Position`](crate::Status::Position): the sequence would go on below what
    ///   [`rewindable_to`](Self::rewindable_to) says.
    /// - [`Step`](crate::Status::Step): a step is open, or the sequence carries a
    ///   tree and some of it would stay.
    pub fn seq_rm(&mut self, sequence: i32, positions: Range<i32>) -> Result<()> {
        self.refuse_in_step("remove from a sequence")?;
        check_sequence(sequence)?;
        check_range(&positions)?;
        let runs = &self.full().held(sequence).runs;
        let stays = |range: Range<i32>| runs.clipped(range).last();
        let last = stays(positions.end..i32::MAX).or_else(|| stays(0..positions.start));
        match last {
            // A tree behind nothing begins at 0.
            None if runs.count() > 0 || positions.contains(&0) => self.drop_tree(sequence),
            None => {}
            Some(run) => {
                self.refuse_under_tree(sequence, "remove a part of it")?;
                let (next, least) = (run.position + run.len, self.least(sequence));
                if next < least && next < self.next(sequence) {
                    fail!(
                        Position,
                        "sequence {sequence} would go on at {next}, but the window layers have \
                         dropped what a query there sees; {least} is the least"
                    );
                }
            }
        }
        for lane in &mut self.lanes {
            lane.remove(sequence, &positions);
        }
        Ok(())
    }

    /// Removes every sequence but one.
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) while a step is open, and for a number that
    /// no sequence has [`InvalidArgument`](crate::Status::InvalidArgument).
    pub fn seq_keep(&mut self, sequence: i32) -> Result<()> {
        self.refuse_in_step("remove sequences")?;
        check_sequence(sequence)?;
        for other in self.sequences() {
            if other != sequence {
                self.seq_rm(other, 0..i32::MAX)?;
            }
        }
        Ok(())
    }

    /// Forgets every sequence and every tree.
    pub fn clear(&mut self) {
        self.lanes.iter_mut().for_each(Lane::clear);
        self.trees.clear();
        self.declared = None;
    }

    /// Appends a frontier of candidates to the tree behind a sequence: the queries
    /// of its next step. A parent is the number of a node before, or -1 for the
    /// sequence itself.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument): no nodes, or a parent
    ///   that is no node before.
    /// - [`Step`](crate::Status::Step): a step is open, or the last frontier is
    ///   still to be run.
    /// - [`Capacity`](crate::Status::Capacity): the frontier does not fit.
    pub fn propose(&mut self, sequence: i32, parents: &[i32]) -> Result<()> {
        self.refuse_in_step("propose a tree")?;
        check_sequence(sequence)?;
        let waiting: usize = self.trees.values().map(Tree::n_pending).sum();
        let room = (self.capacity - self.length()) as usize;
        if waiting + parents.len() > room {
            fail!(
                Capacity,
                "a frontier of {} nodes does not fit: {room} of {} cells are free, {waiting} of \
                 them for other frontiers",
                parents.len(),
                self.capacity
            );
        }
        let n_lanes = self.lanes.len();
        match self.trees.get_mut(&sequence) {
            Some(tree) => tree.propose(parents)?,
            None => {
                let mut tree = Tree::new(n_lanes);
                tree.propose(parents)?;
                self.trees.insert(sequence, tree);
            }
        }
        Ok(())
    }

    /// Nodes of the tree behind a sequence; 0 where there is none.
    ///
    /// # Errors
    /// As [`seq_len`](Self::seq_len).
    pub fn tree_len(&self, sequence: i32) -> Result<usize> {
        check_sequence(sequence)?;
        Ok(self.trees.get(&sequence).map_or(0, Tree::len))
    }

    /// Cells of candidates, over all trees.
    pub fn candidates(&self) -> i32 {
        self.trees.values().map(|tree| tree.n_written() as i32).sum()
    }

    /// Makes a chain of candidates part of their sequence, and forgets the rest of
    /// the tree. The chain's rows move to the first of the tree's cells, as
    /// returned: behind a sequence that is one run, that stays so.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument): no tree, or nodes that
    ///   are no chain from the sequence on.
    /// - [`Step`](crate::Status::Step): a step is open.
    pub fn commit_tree(&mut self, sequence: i32, accepted: &[i32]) -> Result<Vec<Move>> {
        self.refuse_in_step("commit a tree")?;
        check_sequence(sequence)?;
        match self.trees.get(&sequence) {
            None => fail!(InvalidArgument, "sequence {sequence} carries no tree"),
            Some(tree) => tree.check_chain(accepted)?,
        }
        let next = self.next(sequence);
        let Some(tree) = self.trees.remove(&sequence) else {
            return Ok(Vec::new());
        };
        let mut moves = Vec::new();
        for (index, (lane, cells)) in self.lanes.iter_mut().zip(&tree.cells).enumerate() {
            let mut sorted = cells.clone();
            sorted.sort_unstable();
            sorted.iter().for_each(|&cell| lane.release(cell));
            let (mut from, mut to) = (Vec::new(), Vec::new());
            for ((&node, &target), position) in accepted.iter().zip(&sorted).zip(next..) {
                lane.hold(target);
                lane.append(sequence, position, target);
                let source = cells[node as usize];
                if source != target {
                    from.push(source);
                    to.push(target);
                }
            }
            if !from.is_empty() {
                moves.push(Move { lane: index, from: Slots::of(&from), to: Slots::of(&to) });
            }
        }
        moves.extend(self.slide(&[sequence]));
        Ok(moves)
    }

    fn drop_tree(&mut self, sequence: i32) {
        let Some(tree) = self.trees.remove(&sequence) else {
            return;
        };
        for (lane, cells) in self.lanes.iter_mut().zip(&tree.cells) {
            cells.iter().for_each(|&cell| lane.release(cell));
        }
    }

    fn refuse_in_step(&self, what: &str) -> Result<()> {
        if self.step.is_some() {
            fail!(Step, "cannot {what} in the middle of a step");
        }
        Ok(())
    }

    fn refuse_under_tree(&self, sequence: i32, what: &str) -> Result<()> {
        if let Some(tree) = self.trees.get(&sequence) {
            fail!(
                Step,
                "sequence {sequence} carries a tree of {} nodes: commit it before you {what}",
                tree.len()
            );
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

fn check_range(positions: &Range<i32>) -> Result<()> {
    if positions.start < 0 || positions.end < positions.start {
        fail!(
            InvalidArgument,
            "positions from {} to {} are no range",
            positions.start,
            positions.end
        );
    }
    Ok(())
}
