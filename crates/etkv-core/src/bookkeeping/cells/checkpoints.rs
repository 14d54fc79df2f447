//! Checkpoints: positions to which sequences can be rewound although later tokens have displaced rows that a query
//! there sees.
//!
//! A checkpoint owns rows as a sequence does: the rows of each window before the checkpoint's position, and the
//! anchor and convolution rows of recurrent layers. A rewind to the checkpoint shares these rows with the sequence,
//! without a copy.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{check_sequence, CellsBookkeeping, MAX_SEQUENCES};
use crate::bookkeeping::recurrent::BLOCK;
use crate::error::{fail, Result};
use crate::snapshot::{damaged, CheckpointState};

/// The maximum number of checkpoints of a cache.
pub const MAX_CHECKPOINTS: i32 = 256;

/// A position to which some sequences can be rewound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// The number under which the checkpoint owns its rows. It is not the number of a sequence.
    pub owner: i32,
    /// The length of a sequence after a rewind to the checkpoint.
    pub position: i32,
    /// The sequences that can be rewound to the checkpoint: they contain the same text before its position.
    pub members: Vec<i32>,
    /// The value of the counter when the checkpoint was created or last used.
    used: u64,
}

/// The checkpoints of all sequences, and the positions that the host has marked for further checkpoints.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    most: usize,
    all: Vec<Checkpoint>,
    /// The positions that the host has marked and no step has reached yet, by sequence.
    marks: BTreeMap<i32, Vec<i32>>,
    counter: u64,
}

impl Checkpoints {
    pub fn new(most: i32) -> Self {
        let most = most.clamp(0, MAX_CHECKPOINTS) as usize;
        Self { most, all: Vec::new(), marks: BTreeMap::new(), counter: 0 }
    }

    pub fn clear(&mut self) {
        *self = Self::new(self.most as i32);
    }

    /// Returns the checkpoints, in order of creation.
    pub fn all(&self) -> &[Checkpoint] {
        &self.all
    }

    /// Returns whether a mark waits for a step to reach it.
    pub fn has_marks(&self) -> bool {
        !self.marks.is_empty()
    }

    /// Returns the marked positions of a sequence that are in `positions`.
    pub fn marked(&self, sequence: i32, positions: &Range<i32>) -> Vec<i32> {
        let marks = self.marks.get(&sequence).into_iter().flatten();
        marks.copied().filter(|mark| positions.contains(mark)).collect()
    }

    /// Returns the last checkpoint of a sequence at or before a position.
    pub fn below(&self, sequence: i32, position: i32) -> Option<&Checkpoint> {
        let of = |kept: &&Checkpoint| kept.position <= position && kept.members.contains(&sequence);
        self.all.iter().filter(of).max_by_key(|kept| kept.position)
    }

    /// Returns the checkpoints, for a file.
    pub fn state(&self) -> Vec<CheckpointState> {
        let of = |kept: &Checkpoint| CheckpointState {
            owner: kept.owner,
            position: kept.position,
            sequences: kept.members.clone(),
        };
        self.all.iter().map(of).collect()
    }

    /// Replaces the checkpoints by those of a file. The file may have more checkpoints than this cache may create.
    ///
    /// # Errors
    /// [`File`](crate::Status::File) for numbers that a cache does not assign.
    pub fn load(&mut self, state: &[CheckpointState]) -> Result<()> {
        self.clear();
        for kept in state {
            let CheckpointState { owner, position, sequences } = kept;
            let owners = MAX_SEQUENCES..MAX_SEQUENCES + MAX_CHECKPOINTS;
            let known = self.all.iter().any(|other| other.owner == *owner);
            let members = sequences.iter().all(|sequence| (0..MAX_SEQUENCES).contains(sequence));
            if !owners.contains(owner) || known || !members || sequences.is_empty() || *position < 1
            {
                return Err(damaged(format_args!("checkpoint {owner} of position {position}")));
            }
            self.counter += 1;
            self.all.push(Checkpoint {
                owner: *owner,
                position: *position,
                members: sequences.clone(),
                used: self.counter,
            });
        }
        Ok(())
    }

    /// Adds a checkpoint and returns its owner, or `None` if there is no room.
    pub fn add(&mut self, position: i32, members: Vec<i32>) -> Option<i32> {
        let owner = self.free_owner()?;
        self.counter += 1;
        self.all.push(Checkpoint { owner, position, members, used: self.counter });
        Some(owner)
    }

    fn free_owner(&self) -> Option<i32> {
        let taken = |owner: i32| self.all.iter().any(|kept| kept.owner == owner);
        let room = self.all.len() < self.most;
        (MAX_SEQUENCES..MAX_SEQUENCES + MAX_CHECKPOINTS).find(|&owner| room && !taken(owner))
    }

    /// Returns the index of the least useful checkpoint. A checkpoint's usefulness is the number of tokens between it
    /// and the previous checkpoint of the same text, divided by the time since the checkpoint's last use.
    fn least_useful(&self) -> Option<usize> {
        let usefulness = |kept: &Checkpoint| {
            let same = |other: &&Checkpoint| {
                other.position < kept.position
                    && kept.members.iter().any(|member| other.members.contains(member))
            };
            let before = self.all.iter().filter(same).map(|other| other.position).max();
            let saves = i64::from(kept.position - before.unwrap_or(0));
            // Computed with integers, so that the order is the same on every machine.
            saves * 1024 / (self.counter - kept.used + 8) as i64
        };
        (0..self.all.len()).min_by_key(|&at| (usefulness(&self.all[at]), self.all[at].used))
    }

    fn touch(&mut self, owner: i32) {
        self.counter += 1;
        let counter = self.counter;
        self.all.iter_mut().filter(|kept| kept.owner == owner).for_each(|kept| kept.used = counter);
    }
}

impl CellsBookkeeping {
    /// Returns the greatest length, at most `position`, to which a sequence can be rewound.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a sequence number out of range,
    /// [`Position`](crate::Status::Position) for a negative position.
    pub fn reachable(&self, sequence: i32, position: i32) -> Result<i32> {
        check_sequence(sequence)?;
        if position < 0 {
            fail!(Position, "position {position} is negative");
        }
        let position = position.min(self.next(sequence));
        let least = self.rewindable_to(sequence)?;
        // The sequence may have gaps, so this is the end of the last run of positions below `position`.
        let before = self.full().held(sequence).clipped(0..position).last();
        let exact = before.map_or(0, |run| run.position + run.len);
        if exact >= least {
            return Ok(exact);
        }
        let kept = self.checkpoints.below(sequence, position);
        Ok(kept.map_or(0, |kept| kept.position))
    }

    /// Creates a checkpoint of a sequence at `position`. With recurrent layers, `position` is first rounded down to a
    /// multiple of [`BLOCK`]. If the sequence can still be rewound to that position, the checkpoint is created at once.
    /// Otherwise it is created when a step reaches the position. Returns the position, or 0 if the cache allows no
    /// checkpoints.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a sequence number out of range,
    /// [`Position`](crate::Status::Position) for a negative position or one that is no longer reachable,
    /// [`Step`](crate::Status::Step) while a step is open.
    pub fn mark(&mut self, sequence: i32, position: i32) -> Result<i32> {
        self.refuse_in_step("mark a position")?;
        check_sequence(sequence)?;
        if position < 0 {
            fail!(Position, "position {position} is negative");
        }
        let at = if self.recurrent.is_some() { position / BLOCK * BLOCK } else { position };
        if at == 0 || self.checkpoints.most == 0 {
            return Ok(0);
        }
        if self.recurrent.is_none() && self.groups.len() == 1 {
            // Without windows and recurrent layers, no position is ever dropped.
            return Ok(at);
        }
        if let Some(kept) = self.checkpoints.below(sequence, at).filter(|kept| kept.position == at)
        {
            let owner = kept.owner;
            self.checkpoints.touch(owner);
            return Ok(at);
        }
        let next = self.next(sequence);
        let has_anchor = self.recurrent.as_ref().is_none_or(|state| state.has_anchor(sequence, at));
        if at < next || (at == next && has_anchor) {
            let reachable = self.reachable(sequence, at)?;
            if reachable != at || !has_anchor {
                fail!(
                    Position,
                    "position {at} of sequence {sequence} is no longer reachable; the next reachable one below \
                     it is {reachable}. Mark a position before its step"
                );
            }
            self.pin(sequence, at);
        } else {
            let marks = self.checkpoints.marks.entry(sequence).or_default();
            if !marks.contains(&at) {
                marks.push(at);
            }
        }
        Ok(at)
    }

    /// Replaces the marks by the marks of `before`, the bookkeeping before a rewind.
    pub fn keep_marks(&mut self, before: &Self) {
        self.checkpoints.marks.clone_from(&before.checkpoints.marks);
    }

    /// Creates the checkpoints that a step has reached: those at marked positions of these sequences that the step
    /// wrote.
    pub(super) fn pin_marks(&mut self, written: &[(i32, Range<i32>)]) {
        for (sequence, positions) in written {
            // With recurrent layers, a mark at the end of a text waits for the next token, whose step stores the
            // anchor.
            let due = match self.recurrent {
                Some(_) => positions.clone(),
                None => positions.start + 1..positions.end + 1,
            };
            for mark in self.checkpoints.marked(*sequence, &due) {
                self.pin(*sequence, mark);
            }
            if let Some(marks) = self.checkpoints.marks.get_mut(sequence) {
                marks.retain(|mark| !due.contains(mark));
                if marks.is_empty() {
                    self.checkpoints.marks.remove(sequence);
                }
            }
        }
    }

    /// Creates a checkpoint that owns the rows which a query at `position` sees.
    fn pin(&mut self, sequence: i32, position: i32) {
        if self.recurrent.as_ref().is_some_and(|state| !state.has_anchor(sequence, position)) {
            return;
        }
        let text = |sequence: i32| self.full().held(sequence).clipped(0..position);
        let same = |kept: &Checkpoint| {
            let of = |&member: &i32| text(member).eq(text(sequence));
            kept.position == position && kept.members.iter().any(of)
        };
        if let Some(kept) = self.checkpoints.all.iter().position(same) {
            let kept = &mut self.checkpoints.all[kept];
            if !kept.members.contains(&sequence) {
                kept.members.push(sequence);
            }
            let owner = kept.owner;
            return self.checkpoints.touch(owner);
        }
        while self.checkpoints.all.len() >= self.checkpoints.most && self.drop_checkpoint() {}
        let Some(owner) = self.checkpoints.add(position, vec![sequence]) else {
            return;
        };
        for group in &mut self.groups {
            if let Some(window) = group.window {
                let first = window.first_seen(position).max(window.sinks());
                group.share(sequence, owner, 0..window.sinks().min(position));
                group.share(sequence, owner, first..position);
            }
        }
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.pin(sequence, owner, position);
        }
    }

    /// Rewinds a sequence to one of its checkpoints. The sequence must have no tree.
    pub(super) fn go_back(&mut self, sequence: i32, owner: i32, position: i32) {
        self.checkpoints.touch(owner);
        let (full, windows) = match self.groups.split_first_mut() {
            Some(split) => split,
            None => return,
        };
        full.remove(sequence, &(position..i32::MAX));
        for group in windows {
            group.remove(sequence, &(0..i32::MAX));
            group.share(owner, sequence, 0..i32::MAX);
        }
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.restore(owner, sequence);
        }
        self.leave_checkpoints(sequence, position);
    }

    /// Removes a sequence from its checkpoints at positions after `length`.
    pub(super) fn leave_checkpoints(&mut self, sequence: i32, length: i32) {
        for kept in &mut self.checkpoints.all {
            if kept.position > length {
                kept.members.retain(|&member| member != sequence);
            }
        }
        self.drop_unowned();
        if length == 0 {
            self.checkpoints.marks.remove(&sequence);
        }
    }

    /// Adds `target` to the checkpoints of `source` up to `length`.
    pub(super) fn share_checkpoints(&mut self, source: i32, target: i32, length: i32) {
        for kept in &mut self.checkpoints.all {
            let has = |sequence: &i32| kept.members.contains(sequence);
            if kept.position <= length && has(&source) && !has(&target) {
                kept.members.push(target);
            }
        }
    }

    /// Drops the least useful checkpoint. Returns whether there was one.
    pub fn drop_checkpoint(&mut self) -> bool {
        let Some(at) = self.checkpoints.least_useful() else {
            return false;
        };
        self.checkpoints.all[at].members.clear();
        self.drop_unowned();
        true
    }

    fn drop_unowned(&mut self) {
        let Self { checkpoints, groups, recurrent, .. } = self;
        checkpoints.all.retain(|kept| {
            if kept.members.is_empty() {
                groups.iter_mut().for_each(|group| group.remove(kept.owner, &(0..i32::MAX)));
                if let Some(recurrent) = recurrent {
                    recurrent.rewind(kept.owner, 0);
                }
            }
            !kept.members.is_empty()
        });
    }

    /// Returns the positions of a sequence's checkpoints, ascending.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a sequence number out of range.
    pub fn checkpoints_of(&self, sequence: i32) -> Result<Vec<i32>> {
        check_sequence(sequence)?;
        let of = |kept: &&Checkpoint| kept.members.contains(&sequence);
        let mut positions: Vec<i32> =
            self.checkpoints.all.iter().filter(of).map(|kept| kept.position).collect();
        positions.sort_unstable();
        Ok(positions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns checkpoints at these positions of these sequences, created in this order.
    fn of(kept: &[(i32, &[i32])]) -> Checkpoints {
        let mut checkpoints = Checkpoints::new(MAX_CHECKPOINTS);
        for (position, members) in kept {
            checkpoints.add(*position, members.to_vec()).unwrap();
        }
        checkpoints
    }

    fn least_useful(checkpoints: &Checkpoints) -> Option<i32> {
        checkpoints.least_useful().map(|at| checkpoints.all[at].position)
    }

    /// Uses a checkpoint, by its index.
    fn touch(checkpoints: &mut Checkpoints, at: usize, times: usize) {
        let owner = checkpoints.all[at].owner;
        (0..times).for_each(|_| checkpoints.touch(owner));
    }

    #[test]
    fn of_equally_far_checkpoints_the_one_used_longest_ago_is_the_least_useful() {
        assert_eq!(least_useful(&of(&[])), None);
        let mut checkpoints = of(&[(64, &[0]), (128, &[0]), (192, &[0])]);
        assert_eq!(least_useful(&checkpoints), Some(64));
        touch(&mut checkpoints, 0, 1);
        assert_eq!(least_useful(&checkpoints), Some(128));
    }

    #[test]
    fn a_checkpoint_soon_after_another_of_the_same_text_is_less_useful() {
        assert_eq!(least_useful(&of(&[(640, &[0]), (704, &[0]), (1280, &[0])])), Some(704));
        // The order of creation does not matter.
        assert_eq!(least_useful(&of(&[(1280, &[0]), (704, &[0]), (640, &[0])])), Some(704));
        assert_eq!(least_useful(&of(&[(640, &[0, 2]), (704, &[1, 2])])), Some(704));
        // The checkpoint at 640 belongs to another text, so the one at 704 saves 704 tokens.
        assert_eq!(least_useful(&of(&[(640, &[0]), (704, &[1])])), Some(640));
    }

    #[test]
    fn the_distance_is_divided_by_the_time_since_the_last_use() {
        let mut checkpoints = of(&[(6400, &[0]), (6464, &[0])]);
        // 6400 tokens are 100 times 64 tokens. The time is counted from 8, and one use has passed.
        touch(&mut checkpoints, 1, 100 * 8 - 9);
        assert_eq!(least_useful(&checkpoints), Some(6400), "of equals, the one used longest ago");
        touch(&mut checkpoints, 0, 1);
        touch(&mut checkpoints, 1, 100 * 8 - 9);
        assert_eq!(least_useful(&checkpoints), Some(6464));
    }

    #[test]
    fn checkpoints_give_way_where_they_are_dense() {
        let mut checkpoints = of(&[(64, &[0]), (128, &[0]), (192, &[0]), (256, &[0])]);
        let mut dropped = Vec::new();
        while let Some(at) = checkpoints.least_useful() {
            dropped.push(checkpoints.all.remove(at).position);
        }
        assert_eq!(dropped, [64, 192, 128, 256]);
    }

    #[test]
    fn of_equally_useful_checkpoints_the_one_used_longest_ago_is_dropped() {
        let mut checkpoints = of(&[(1, &[0]), (1, &[1]), (6400, &[2])]);
        touch(&mut checkpoints, 0, 1);
        // After so many uses of the last one, both others have a usefulness of 0.
        touch(&mut checkpoints, 2, 3000);
        assert_eq!(checkpoints.least_useful(), Some(1));
    }
}
