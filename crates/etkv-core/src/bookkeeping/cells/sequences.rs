//! Changes to sequences between steps: forks, removals, rewinds.

use std::ops::Range;

use super::group::LayerGroup;
use super::{check_sequence, CellsBookkeeping};
use crate::error::{fail, Result};

impl CellsBookkeeping {
    /// Returns the least position, other than 0, to which a sequence can be rewound without a checkpoint. The sequence
    /// has the position before this least position, and every layer group has all positions that a query at the least
    /// position sees.
    ///
    /// # Errors
    /// Errors of [`seq_len`](Self::seq_len).
    pub fn rewindable_to(&self, sequence: i32) -> Result<i32> {
        check_sequence(sequence)?;
        let held = self.full().held(sequence);
        let least = self.exact_from(sequence, 0..i32::MAX);
        if least == 0 && held.first() == Some(0) {
            return Ok(0);
        }
        let reachable = held.clipped((least - 1).max(0)..i32::MAX).next();
        Ok(reachable.map_or(0, |run| run.position + 1))
    }

    /// Returns the least position at which a query of a sequence sees no dropped position, or 0 if no layer group has
    /// dropped any. Only `positions` count as dropped.
    fn exact_from(&self, sequence: i32, positions: Range<i32>) -> i32 {
        let exact_from = |group: &LayerGroup| {
            let window = group.window?;
            let after_sinks = positions.start.max(window.sinks())..positions.end;
            let all = self.full().held(sequence);
            let dropped = all.last_missing_in(group.held(sequence), &after_sinks)?;
            Some(window.rewindable_to(dropped + 1))
        };
        let windows = self.groups.iter().filter_map(exact_from).max().unwrap_or(0);
        let recurrent = self.recurrent.as_ref().map_or(0, |state| state.exact_from(sequence));
        windows.max(recurrent)
    }

    /// Returns the kinds of layers that drop positions, for messages.
    fn dropping_layers(&self) -> &'static str {
        match (&self.recurrent, self.groups.len()) {
            (None, _) => "window",
            (Some(_), 1) => "recurrent",
            (Some(_), _) => "window and recurrent",
        }
    }

    /// Makes `target` share the cells of `source` at `positions`. If the range ends at `i32::MAX`, it includes all
    /// positions at or after its start.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument): the number of a sequence or the range is out of range.
    /// - [`Position`](crate::Status::Position): `target` has other cells for some of these positions, or window layer
    ///   groups have dropped positions that its next query would see.
    /// - [`Step`](crate::Status::Step): a step is open, or `target` has a tree.
    pub fn seq_cp(&mut self, source: i32, target: i32, positions: Range<i32>) -> Result<()> {
        self.refuse_in_step("copy a sequence")?;
        check_sequence(source)?;
        check_sequence(target)?;
        check_range(&positions)?;
        self.refuse_under_tree(target, "copy onto it")?;
        if source == target {
            return Ok(());
        }
        let (from, to) = (self.full().held(source), self.full().held(target));
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
                        "sequences {source} and {target} hold different tokens at position {}; remove \
                         it from sequence {target} first",
                        other.position
                    );
                }
            }
        }
        let dropped = self.exact_from(target, 0..i32::MAX);
        let least = dropped.max(self.exact_from(source, positions.clone()));
        let begins = positions.start == 0 && to.count() == 0;
        if self.recurrent.is_some() && !begins {
            fail!(
                Position,
                "recurrent layers hold the state after a whole text: start the copy at \
                     position 0, and copy to an empty sequence; sequence {target} holds {} \
                     positions, and the copy starts at {}",
                to.count(),
                positions.start
            );
        }
        let kept = self.checkpoints.below(source, end).filter(|kept| kept.position == end);
        if let Some(owner) = kept.filter(|_| begins && end < least).map(|kept| kept.owner) {
            self.groups[0].share(source, target, positions);
            self.go_back(target, owner, end);
            self.share_checkpoints(source, target, end);
            return Ok(());
        }
        if end < least {
            fail!(
                Position,
                "sequence {target} would continue at {end}, but the {} layers have dropped \
                 positions that a query there sees; it can continue at {least} or later{}",
                self.dropping_layers(),
                match self.checkpoints.below(source, end).filter(|_| begins) {
                    None => String::new(),
                    Some(kept) => format!(", or at {}", kept.position),
                }
            );
        }
        for group in &mut self.groups {
            group.share(source, target, positions.clone());
        }
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.fork(source, target, end);
        }
        if positions.start == 0 {
            self.share_checkpoints(source, target, end.min(positions.end));
        }
        Ok(())
    }

    /// Removes positions from a sequence. Cells without an owner become free. If the range ends at `i32::MAX`, it
    /// includes all positions at or after its start. Removing all positions also removes the sequence's tree. The
    /// sequence then begins at 0 again, even if its first position was not 0.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument): the number of the sequence or the range is out of
    ///   range.
    /// - [`Position`](crate::Status::Position): the sequence would continue below
    ///   [`rewindable_to`](Self::rewindable_to).
    /// - [`Step`](crate::Status::Step): a step is open, or the sequence has a tree and some of its positions would
    ///   stay.
    pub fn seq_rm(&mut self, sequence: i32, positions: Range<i32>) -> Result<()> {
        self.refuse_in_step("remove from a sequence")?;
        check_sequence(sequence)?;
        check_range(&positions)?;
        let runs = self.full().held(sequence);
        let stays = |range: Range<i32>| runs.clipped(range).last();
        let last = stays(positions.end..i32::MAX).or_else(|| stays(0..positions.start));
        match last {
            // The tree of an empty sequence begins at 0.
            None if runs.count() > 0 || positions.contains(&0) => self.drop_tree(sequence),
            None => {}
            Some(run) => {
                self.refuse_under_tree(sequence, "remove a part of it")?;
                let (next, least) =
                    (run.position + run.len, self.exact_from(sequence, 0..i32::MAX));
                let removes = runs.clipped(positions.clone()).next().is_some();
                if self.recurrent.is_some() && removes && next == self.next(sequence) {
                    fail!(
                        Position,
                        "cannot remove positions {} to {} of sequence {sequence}: they are not its last, and the state \
                         of recurrent layers depends on all earlier positions; remove all positions from the \
                         first one to the end",
                        positions.start,
                        positions.end
                    );
                }
                if next < least && next < self.next(sequence) {
                    let kept = self.checkpoints.below(sequence, next);
                    if let Some(kept) = kept.filter(|kept| kept.position == next) {
                        let owner = kept.owner;
                        self.go_back(sequence, owner, next);
                        return Ok(());
                    }
                    fail!(
                        Position,
                        "sequence {sequence} would continue at {next}, but the {} layers have dropped \
                         positions that a query there sees; it can continue at {least} or later{}",
                        self.dropping_layers(),
                        match self.reachable(sequence, next)? {
                            0 => String::new(),
                            kept => format!(", or at {kept}"),
                        }
                    );
                }
            }
        }
        for group in &mut self.groups {
            group.remove(sequence, &positions);
        }
        let next = self.next(sequence);
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.rewind(sequence, next);
        }
        if !positions.is_empty() {
            self.leave_checkpoints(sequence, positions.start.min(next));
        }
        Ok(())
    }

    /// Removes the positions at or after `length` from the only sequence, which then continues at `length`. A
    /// `length` of 0 removes all.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument) if there are several sequences.
    /// - [`Position`](crate::Status::Position): `length` is negative or greater than the next position. Also if
    ///   `length` is not 0 and either is below [`rewindable_to`](Self::rewindable_to) or follows a position that was
    ///   removed.
    /// - [`Step`](crate::Status::Step): a step is open, or the sequence has a tree and some of its positions would
    ///   stay.
    pub fn rewind(&mut self, length: i32) -> Result<()> {
        self.refuse_in_step("rewind the cache")?;
        let sequence = self.only_sequence("call seq_rm to shorten one of them")?;
        let next = self.next(sequence);
        if length < 0 || length > next {
            fail!(
                Position,
                "cannot rewind to length {length}: the next position of the sequence is {next}"
            );
        }
        // If position `length - 1` was removed, the sequence would not continue at `length`.
        let before = length - 1;
        if length > 0 && self.full().held(sequence).clipped(before..length).next().is_none() {
            fail!(
                Position,
                "cannot rewind to length {length}: position {before} was removed; {} is the minimum \
                 length, and 0 removes all",
                self.rewindable_to(sequence)?
            );
        }
        self.seq_rm(sequence, length..i32::MAX)
    }

    /// Removes every sequence but one.
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) while a step is open; [`InvalidArgument`](crate::Status::InvalidArgument) for a
    /// sequence number out of range.
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
}

fn check_range(positions: &Range<i32>) -> Result<()> {
    if positions.start < 0 || positions.end < positions.start {
        fail!(
            InvalidArgument,
            "expected a range of positions that starts at 0 or later, got {} to {}",
            positions.start,
            positions.end
        );
    }
    Ok(())
}
