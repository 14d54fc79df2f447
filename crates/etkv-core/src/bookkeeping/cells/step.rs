//! One step over sequences and trees: the sequences and cells of its tokens, and its commit or abort.

use std::collections::BTreeMap;
use std::ops::Range;

use super::recurrent::Recurrent;
use super::segments::Segments;
use super::tree::Tree;
use super::{check_sequence, CellsBookkeeping, MAX_SEQUENCES};
use crate::bookkeeping::{LayerGroupPlan, Move};
use crate::error::{fail, Result};

/// A planned step that is neither committed nor aborted.
#[derive(Debug, Clone)]
pub struct OpenStep {
    pub(super) segments: Segments,
    declared: bool,
}

/// One number for each sequence.
type PerSequence = [i32; MAX_SEQUENCES as usize];

impl CellsBookkeeping {
    /// Declares the sequence of each token of the next step. Without a declaration, the tokens belong to the pending
    /// frontiers, in the order of their sequences. If no frontier is pending, they belong to the only sequence.
    ///
    /// The declaration applies until a step commits.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if there are no tokens, or for a sequence number out of
    /// range; [`Step`](crate::Status::Step) while a step is open. An earlier declaration then remains.
    pub fn begin_step(&mut self, sequences: &[i32]) -> Result<()> {
        self.refuse_in_step("declare the sequences of tokens")?;
        refuse_none(sequences.len())?;
        let mut segments = Segments::none();
        for &sequence in sequences {
            check_sequence(sequence)?;
            segments.push(&[sequence], 1);
        }
        self.declared = Some(segments.simplified());
        Ok(())
    }

    /// Declares the sequences of each token of the next step. A token may belong to several.
    ///
    /// # Errors
    /// Errors of [`begin_step`](Self::begin_step), and [`InvalidArgument`](crate::Status::InvalidArgument) for a
    /// token without a sequence or with the same sequence twice.
    pub fn begin_step_shared(&mut self, sequences: &[&[i32]]) -> Result<()> {
        self.refuse_in_step("declare the sequences of tokens")?;
        refuse_none(sequences.len())?;
        let mut segments = Segments::none();
        for (token, members) in sequences.iter().enumerate() {
            if members.is_empty() {
                fail!(
                    InvalidArgument,
                    "token {token} of the step belongs to no sequence; name one"
                );
            }
            for (index, &member) in members.iter().enumerate() {
                check_sequence(member)?;
                if members[..index].contains(&member) {
                    fail!(
                        InvalidArgument,
                        "token {token} of the step belongs to sequence {member} twice"
                    );
                }
            }
            segments.push(members, 1);
        }
        self.declared = Some(segments.simplified());
        Ok(())
    }

    /// Withdraws the declaration of [`begin_step`](Self::begin_step) or
    /// [`begin_step_shared`](Self::begin_step_shared). Does nothing if there is none.
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) while a step is open.
    pub fn cancel_step(&mut self) -> Result<()> {
        self.refuse_in_step("cancel the declaration")?;
        self.declared = None;
        Ok(())
    }

    /// Returns whether the tokens of the next step belong to the only sequence: no frontier is pending and there is
    /// no declaration.
    pub fn awaits_text(&self) -> bool {
        self.declared.is_none() && self.trees.values().all(|tree| tree.n_pending() == 0)
    }

    /// Plans a step for tokens at these positions, and opens it. Each plan has the slots that a layer group writes
    /// and reads, and its mask. [`commit`](Self::commit) or [`abort`](Self::abort) ends the step.
    ///
    /// A token's position must be the next position of each of its sequences. A candidate's position is that position
    /// plus its depth in the tree.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument): there are no tokens, more or fewer than were declared,
    ///   or several sequences without a declaration.
    /// - [`Position`](crate::Status::Position): a position is not the next position of its sequence.
    /// - [`Capacity`](crate::Status::Capacity): too few cells are free, a sequence has more tokens than layer groups
    ///   with windows accept in a step, or a mask would have more elements than an array can have.
    pub fn plan(&mut self, positions: &[i32]) -> Result<&[LayerGroupPlan]> {
        self.refuse_in_step("begin another")?;
        let declared = self.declared.take();
        let was_declared = declared.is_some();
        let planned = match declared {
            Some(segments) => Ok(segments),
            None => self.undeclared(positions.len()),
        };
        let segments = planned?;
        let checked = self.check(&segments, positions);
        let checked = checked.and_then(|()| self.check_one_text(&segments));
        if let Err(error) = checked.and_then(|()| self.plan_groups(&segments, positions)) {
            self.declared = was_declared.then_some(segments);
            return Err(error);
        }
        self.positions.clear();
        self.positions.extend_from_slice(positions);
        self.step = Some(OpenStep { segments, declared: was_declared });
        Ok(&self.plans)
    }

    /// Allocates cells for the tokens of a step and plans every layer group. On failure, no cells stay allocated.
    fn plan_groups(&mut self, segments: &Segments, positions: &[i32]) -> Result<()> {
        let mut plans = std::mem::take(&mut self.plans);
        let mut all = std::mem::take(&mut self.cells);
        plans.clear();
        all.iter_mut().for_each(Vec::clear);
        let planned = all.iter_mut().enumerate().try_for_each(|(group, cells)| {
            self.allocate(group, segments, cells);
            plans.push(self.group_plan(group, segments, positions, cells)?);
            Ok(())
        });
        (self.plans, self.cells) = (plans, all);
        let planned = planned.and_then(|()| self.plan_recurrent(segments, positions));
        if planned.is_err() {
            self.free_planned();
        }
        planned
    }

    /// Plans the rows and anchors of recurrent layers.
    fn plan_recurrent(&mut self, segments: &Segments, positions: &[i32]) -> Result<()> {
        let Self { recurrent: Some(recurrent), checkpoints, trees, plans, .. } = self else {
            return Ok(());
        };
        let pins = |sequence, positions: Range<i32>| checkpoints.marked(sequence, &positions);
        recurrent.plan(segments, positions, trees, pins)?;
        let end = positions.iter().max().map_or(0, |last| last + 1);
        plans.extend(recurrent.buffer_plans(end));
        Ok(())
    }

    /// If the model has recurrent layers, refuses a token that belongs to sequences with different texts before it.
    fn check_one_text(&self, segments: &Segments) -> Result<()> {
        if self.recurrent.is_none() || segments.only_member().is_some() {
            return Ok(());
        }
        // The last token of each sequence: the cell of an earlier step, or a token of this step.
        let mut last: BTreeMap<i32, usize> = BTreeMap::new();
        let mut token = 0;
        for (members, n_tokens) in segments.iter() {
            let before = |sequence: i32| {
                let held = || self.full().cell_of(sequence, self.next(sequence) - 1);
                (last.get(&sequence), last.get(&sequence).map_or_else(held, |_| None))
            };
            let mut texts = members.iter().map(|&member| (member, before(member)));
            if let Some((first, text)) = texts.next() {
                if let Some((other, _)) = texts.find(|(_, other)| *other != text) {
                    fail!(
                        InvalidArgument,
                        "token {token} of the step belongs to the sequences {first} and {other}, which hold \
                         different tokens before it; recurrent layers follow one text: pass the token once for \
                         each"
                    );
                }
            }
            token += n_tokens;
            last.extend(members.iter().map(|&member| (member, token)));
        }
        Ok(())
    }

    /// Frees the cells of a step.
    fn free_planned(&mut self) {
        for (group, cells) in self.groups.iter_mut().zip(&self.cells) {
            cells.iter().for_each(|&cell| group.free(cell));
        }
    }

    /// Returns the plans of the open step, one plan for each layer group. Empty if no step is open.
    pub fn plans(&self) -> &[LayerGroupPlan] {
        if self.step.is_some() {
            &self.plans
        } else {
            &[]
        }
    }

    fn undeclared(&self, n_tokens: usize) -> Result<Segments> {
        let mut frontiers = Segments::none();
        for (&sequence, tree) in self.trees.iter().filter(|(_, tree)| tree.n_pending() > 0) {
            frontiers.push(&[sequence], tree.n_pending());
        }
        if frontiers.members().is_empty() {
            let otherwise = "call begin_step to assign tokens";
            return Ok(Segments::One { sequence: self.only_sequence(otherwise)?, n_tokens });
        }
        Ok(frontiers.simplified())
    }

    fn check(&self, segments: &Segments, positions: &[i32]) -> Result<()> {
        if positions.is_empty() {
            fail!(InvalidArgument, "a step needs at least 1 token");
        }
        if segments.n_tokens() != positions.len() {
            fail!(
                InvalidArgument,
                "the step has {} tokens, but begin_step declared {}",
                positions.len(),
                segments.n_tokens()
            );
        }
        if let Some(sequence) = segments.only_member() {
            for (ahead, &position) in (0..).zip(positions) {
                self.check_position(ahead as usize, position, sequence, ahead, &[sequence])?;
            }
            self.check_count(sequence, positions.len() as i32)?;
        } else {
            self.check_each(segments, positions)?;
        }
        let free = self.capacity - self.length();
        if positions.len() > free as usize {
            fail!(
                Capacity,
                "a step of {} tokens does not fit: {free} of {} cells are free",
                positions.len(),
                self.capacity
            );
        }
        Ok(())
    }

    fn check_each(&self, segments: &Segments, positions: &[i32]) -> Result<()> {
        let mut ahead: PerSequence = [0; MAX_SEQUENCES as usize];
        let mut tokens = positions.iter().enumerate();
        for (members, n_tokens) in segments.iter() {
            for (token, &position) in tokens.by_ref().take(n_tokens) {
                for &sequence in members {
                    let ahead = &mut ahead[sequence as usize];
                    self.check_position(token, position, sequence, *ahead, members)?;
                    *ahead += 1;
                }
            }
        }
        for &sequence in segments.members() {
            self.check_count(sequence, ahead[sequence as usize])?;
        }
        Ok(())
    }

    fn check_position(
        &self,
        token: usize,
        position: i32,
        sequence: i32,
        ahead: i32,
        members: &[i32],
    ) -> Result<()> {
        let expected = self.expected(sequence, ahead, members)?;
        if i64::from(position) != expected || position == i32::MAX {
            fail!(
                Position,
                "expected position {expected} for token {token} of the step, the next of sequence \
                 {sequence}, got {position}"
            );
        }
        Ok(())
    }

    /// Checks that a frontier is complete, and that layer groups with windows accept this number of tokens in a step.
    fn check_count(&self, sequence: i32, n_tokens: i32) -> Result<()> {
        if let Some(tree) = self.trees.get(&sequence) {
            if n_tokens as usize != tree.n_pending() {
                fail!(
                    InvalidArgument,
                    "expected all {} candidates of sequence {sequence} in the step, got {n_tokens}",
                    tree.n_pending()
                );
            }
        }
        for window in self.groups.iter().filter_map(|group| group.window) {
            window.check_step(n_tokens)?;
        }
        Ok(())
    }

    /// Returns the position of the token of `sequence` that follows `ahead` other tokens of this step.
    fn expected(&self, sequence: i32, ahead: i32, members: &[i32]) -> Result<i64> {
        let next = i64::from(self.next(sequence));
        let Some(tree) = self.trees.get(&sequence) else {
            return Ok(next + i64::from(ahead));
        };
        let node = tree.n_written() + ahead as usize;
        if members.len() > 1 || node >= tree.len() {
            fail!(
                Step,
                "sequence {sequence} carries a tree of {} nodes, {} of them for this step; it \
                 accepts no other tokens before the tree is committed",
                tree.len(),
                tree.n_pending()
            );
        }
        Ok(next + i64::from(tree.depth(node)))
    }

    /// Allocates a cell of a layer group for each token.
    fn allocate(&mut self, group: usize, segments: &Segments, cells: &mut Vec<i32>) {
        if let Segments::One { sequence, n_tokens } = *segments {
            let after = self.cell_after(group, sequence);
            return self.groups[group].allocate(n_tokens as i32, after, cells);
        }
        let mut next_cells: PerSequence = [-1; MAX_SEQUENCES as usize];
        for (members, n_tokens) in segments.iter() {
            let Some(&sequence) = members.first() else {
                continue;
            };
            let after = match next_cells[sequence as usize] {
                -1 => self.cell_after(group, sequence),
                cell => Some(cell),
            };
            self.groups[group].allocate(n_tokens as i32, after, cells);
            if let Some(&last) = cells.last() {
                members.iter().for_each(|&member| next_cells[member as usize] = last + 1);
            }
        }
    }

    /// Returns the cell after the last cell of a sequence and its tree.
    fn cell_after(&self, group: usize, sequence: i32) -> Option<i32> {
        match self.trees.get(&sequence).and_then(|tree| tree.cells[group].last()) {
            Some(&node) => Some(node + 1),
            None => self.groups[group].held(sequence).cell_after(),
        }
    }

    /// Commits the open step. Returns the moves of rows in window layer groups.
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) if no step is open.
    pub fn commit(&mut self) -> Result<Vec<Move>> {
        let Some(OpenStep { segments, .. }) = self.step.take() else {
            fail!(Step, "no step is open on this cache");
        };
        let mut first = 0;
        for (members, n_tokens) in segments.iter() {
            let tokens = first..first + n_tokens;
            first = tokens.end;
            match members {
                &[sequence] if self.trees.contains_key(&sequence) => {
                    for (index, group) in self.groups.iter_mut().enumerate() {
                        let cells = &self.cells[index][tokens.clone()];
                        cells.iter().for_each(|&cell| group.own_as_node(cell));
                        if let Some(tree) = self.trees.get_mut(&sequence) {
                            tree.cells[index].extend_from_slice(cells);
                        }
                    }
                }
                _ => {
                    for (group, cells) in self.groups.iter_mut().zip(&self.cells) {
                        for (&cell, &position) in
                            cells[tokens.clone()].iter().zip(&self.positions[tokens.clone()])
                        {
                            members.iter().for_each(|&member| group.append(member, position, cell));
                        }
                    }
                }
            }
        }
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.commit(&segments, &self.positions, &mut self.trees);
        }
        self.trees.values_mut().filter(|tree| is_written(tree)).for_each(Tree::written);
        self.keep_marked(&segments);
        Ok(self.slide(segments.members()))
    }

    /// Creates the checkpoints that a committed step has reached.
    fn keep_marked(&mut self, segments: &Segments) {
        if self.checkpoints.has_marks() {
            let mut first = 0;
            let mut written = Vec::new();
            for (members, n_tokens) in segments.iter() {
                let tokens = &self.positions[first..first + n_tokens];
                first += n_tokens;
                let (Some(&start), Some(&last)) = (tokens.first(), tokens.last()) else { continue };
                let texts = members.iter().filter(|member| !self.trees.contains_key(member));
                written.extend(texts.map(|&member| (member, start..last + 1)));
            }
            self.pin_marks(&written);
        }
    }

    /// Rolls the open step back. Does nothing if no step is open.
    pub fn abort(&mut self) {
        if let Some(OpenStep { segments, declared, .. }) = self.step.take() {
            self.free_planned();
            self.recurrent.iter_mut().for_each(Recurrent::abort);
            if declared {
                self.declared = Some(segments);
            }
        }
    }

    /// Drops the positions of these sequences that layer groups with windows no longer need. If a layer group has a
    /// single sequence, then moves the rows of that sequence to the first cells, in the order of positions.
    pub(super) fn slide(&mut self, sequences: &[i32]) -> Vec<Move> {
        let mut moves = Vec::new();
        if self.groups.len() == 1 && self.recurrent.is_none() {
            return moves;
        }
        let nexts: Vec<(i32, i32)> = sequences
            .iter()
            .filter(|sequence| !self.trees.contains_key(sequence))
            .map(|&sequence| (sequence, self.next(sequence)))
            .collect();
        if let Some(recurrent) = &mut self.recurrent {
            nexts.iter().for_each(|&(sequence, next)| recurrent.trim(sequence, next));
        }
        for (index, group) in self.groups.iter_mut().enumerate() {
            let mut trimmed = false;
            for &(sequence, next) in &nexts {
                trimmed |= group.trim(sequence, next);
            }
            if trimmed && self.trees.is_empty() && group.owners().nth(1).is_none() {
                moves.extend(group.pack(index));
            }
        }
        moves
    }
}

fn is_written(tree: &Tree) -> bool {
    tree.cells.first().is_some_and(|cells| cells.len() == tree.len())
}

/// Checks that a declaration has tokens, because a step without tokens could not commit.
fn refuse_none(n_tokens: usize) -> Result<()> {
    if n_tokens == 0 {
        fail!(InvalidArgument, "expected the sequences of at least 1 token, got none");
    }
    Ok(())
}
