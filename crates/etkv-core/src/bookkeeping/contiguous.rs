//! One growing sequence. Position `p` is in slot `p`, so the length alone describes the sequence. Layers with a sliding
//! window drop early positions and move their rows.

mod state;

use std::ops::Range;
use std::sync::Arc;

use super::mask_runs::{mask_len, MaskRuns};
use super::{LayerGroupPlan, MaskPlan, Move, Slots, Window};
use crate::error::{fail, Result};

/// The length of one sequence of at most `capacity` positions, and the positions that its layer groups have dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContiguousBookkeeping {
    capacity: i32,
    length: i32,
    groups: Vec<LayerGroup>,
    /// A counter of changes, to detect stale plans.
    changes: u64,
}

/// The layers that share a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
struct LayerGroup {
    window: Option<Window>,
    /// The number of dropped positions. They directly follow the sinks.
    dropped: i32,
}

/// The mask of a step over the slots that it reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sight {
    All,
    Causal,
    /// One window for each query.
    Windows,
}

/// The positions that a step writes and reads. [`ContiguousBookkeeping::plan`] computes a plan without changing the
/// sequence. [`ContiguousBookkeeping::commit`] applies the plan, unless the sequence has changed in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContiguousPlan {
    /// The first position of the step.
    pub start: i32,
    /// The last position plus 1: the length after the step.
    pub end: i32,
    /// The length before the step. If it is greater than `start`, the step rewinds.
    pub length: i32,
    changes: u64,
}

impl ContiguousPlan {
    /// Returns the number of query tokens of the step.
    pub fn n_tokens(&self) -> i32 {
        self.end - self.start
    }

    /// Returns the positions whose current rows the step overwrites.
    pub fn displaced(&self) -> Range<i32> {
        self.start..self.end.min(self.length).max(self.start)
    }
}

impl ContiguousBookkeeping {
    /// Returns an empty sequence of at most `capacity` positions. A layer group has full history
    /// (`None`) or a window.
    pub fn new(capacity: i32, groups: impl IntoIterator<Item = Option<Window>>) -> Self {
        let groups = groups.into_iter().map(|window| LayerGroup { window, dropped: 0 }).collect();
        Self { capacity, length: 0, groups, changes: 0 }
    }

    /// Returns the maximum number of positions of the sequence.
    pub fn capacity(&self) -> i32 {
        self.capacity
    }

    /// Returns the number of positions of the sequence.
    pub fn length(&self) -> i32 {
        self.length
    }

    /// Returns the number of positions that a layer group guarantees to keep. After a rewind, the group may lack
    /// positions that a sequence of this length would otherwise keep.
    ///
    /// # Panics
    /// If the layer group does not exist.
    pub fn used(&self, group: usize) -> i32 {
        let LayerGroup { window, dropped } = &self.groups[group];
        let kept = window.map_or(self.length, |window| window.held(self.length));
        kept.min(self.length - dropped)
    }

    /// Returns whether `n` more positions fit; false for a negative `n`.
    pub fn can_extend(&self, n: i32) -> bool {
        n >= 0 && n <= self.capacity - self.length
    }

    /// Returns the least length, other than 0, to which the sequence can be rewound. At that length, every layer
    /// group still has all positions that a query sees.
    pub fn rewindable_to(&self) -> i32 {
        self.groups.iter().map(LayerGroup::rewindable_to).max().unwrap_or(0)
    }

    /// Plans a step for tokens at these positions. They must be consecutive, and the first is at most the length. If
    /// the first position is the length, the step appends. If it is less, the step first rewinds to it.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument): there are no tokens.
    /// - [`Position`](crate::Status::Position): a position is negative, there is a gap after the sequence, the
    ///   positions are not consecutive, or a rewind would go below [`rewindable_to`](Self::rewindable_to).
    /// - [`Capacity`](crate::Status::Capacity): the positions go beyond the capacity, there are more tokens than
    ///   layer groups with windows accept in a step, or a mask would have more elements than an array can have.
    pub fn plan(&self, positions: &[i32]) -> Result<ContiguousPlan> {
        let Some(&start) = positions.first() else {
            fail!(InvalidArgument, "a step needs at least 1 token");
        };
        if start < 0 {
            fail!(Position, "position {start} is negative");
        }
        if start > self.length {
            fail!(Position, "position {start} leaves a gap: the next is {}", self.length);
        }
        for (offset, &position) in positions.iter().enumerate() {
            let expected = i64::from(start) + offset as i64;
            if i64::from(position) != expected {
                fail!(
                    Position,
                    "expected position {expected} for token {offset} of the step, got {position}: the \
                     positions of one sequence are consecutive"
                );
            }
        }
        let end = i64::from(start) + positions.len() as i64;
        if end > i64::from(self.capacity) {
            fail!(
                Capacity,
                "{} at position {start} need {end} positions, but the capacity is {}; \
                 rewind, or create a larger cache",
                match positions.len() {
                    1 => String::from("1 token"),
                    n => format!("{n} tokens"),
                },
                self.capacity
            );
        }
        if start < self.length {
            self.check_rewind(start)?;
        }
        // `end` is at most `capacity`, which is an i32.
        let plan =
            ContiguousPlan { start, end: end as i32, length: self.length, changes: self.changes };
        for (group, state) in self.groups.iter().enumerate() {
            let Some(window) = state.window else {
                continue;
            };
            window.check_step(plan.n_tokens())?;
            if let (read, Sight::Windows) = self.read(group, &plan) {
                mask_len(plan.n_tokens() as usize, read.len())?;
            }
        }
        Ok(plan)
    }

    /// Returns the slots of one layer group that a plan writes and reads. The plan must not be stale. Layer groups
    /// are numbered in their order in [`new`](Self::new).
    ///
    /// # Panics
    /// If the layer group does not exist, as in [`used`](Self::used) and [`displaced`](Self::displaced).
    pub fn group(&self, group: usize, plan: &ContiguousPlan) -> Result<LayerGroupPlan> {
        let dropped = self.dropped(group, plan);
        let write = Slots::Run(plan.start - dropped..plan.end - dropped);
        let (read, sight) = self.read(group, plan);
        let mask = match sight {
            Sight::All => MaskPlan::None,
            Sight::Causal => MaskPlan::Causal,
            Sight::Windows => MaskPlan::Explicit(Arc::new(self.windows(group, plan, &read)?)),
        };
        Ok(LayerGroupPlan { write, read, mask })
    }

    /// Returns [`group`](Self::group) for each layer group.
    pub fn groups<'a>(
        &'a self,
        plan: &'a ContiguousPlan,
    ) -> impl Iterator<Item = Result<LayerGroupPlan>> + 'a {
        (0..self.groups.len()).map(|group| self.group(group, plan))
    }

    /// Returns the slots that a plan reads in a layer group, and the mask of its queries.
    fn read(&self, group: usize, plan: &ContiguousPlan) -> (Range<i32>, Sight) {
        let end = plan.end - self.dropped(group, plan);
        let causal = if plan.n_tokens() == 1 { Sight::All } else { Sight::Causal };
        let Some(window) = self.groups[group].window else {
            return (0..end, causal);
        };
        if window.first_seen(plan.end - 1) <= window.sinks() {
            return (0..end, causal);
        }
        if window.sinks() > 0 {
            return (0..end, Sight::Windows);
        }
        let first = window.first_seen(plan.start);
        // If all queries are in one chunk, they see the chunk from its start.
        let is_shared = first == window.first_seen(plan.end - 1);
        let sight = if is_shared { causal } else { Sight::Windows };
        (first - self.dropped(group, plan)..end, sight)
    }

    /// Returns the mask of windows over the slots in `read`.
    fn windows(&self, group: usize, plan: &ContiguousPlan, read: &Range<i32>) -> Result<MaskRuns> {
        let dropped = self.dropped(group, plan);
        let mut mask = MaskRuns::new(plan.n_tokens() as usize, read.len())?;
        let Some(window) = self.groups[group].window else {
            return Ok(mask);
        };
        for position in plan.start..plan.end {
            // If there are sinks, `read` starts at slot 0.
            mask.see(0..window.sinks().min(position + 1))?;
            let seen = window.first_seen(position).max(window.sinks());
            let slot = |position: i32| position - dropped - read.start;
            mask.see(slot(seen)..slot(position) + 1)?;
            mask.end_query();
        }
        Ok(mask)
    }

    /// Returns the slots of one layer group whose current rows a plan overwrites. The plan must not be stale.
    ///
    /// # Panics
    /// If the layer group does not exist.
    pub fn displaced(&self, group: usize, plan: &ContiguousPlan) -> Range<i32> {
        let dropped = self.dropped(group, plan);
        let positions = plan.displaced();
        positions.start - dropped..positions.end - dropped
    }

    /// Returns the number of positions that are dropped before a plan's step: 0 for a step from position 0, because
    /// it begins the sequence anew.
    fn dropped(&self, group: usize, plan: &ContiguousPlan) -> i32 {
        if plan.start == 0 {
            0
        } else {
            self.groups[group].dropped
        }
    }

    /// Applies a plan: the sequence then ends where the step ends. Layer groups without room for another step drop
    /// the positions that they no longer need. Returns the moves of rows.
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) for a stale plan: after it was computed, another plan was committed, or the
    /// sequence was rewound or cleared. Nothing has changed.
    pub fn commit(&mut self, plan: &ContiguousPlan) -> Result<Vec<Move>> {
        if plan.changes != self.changes {
            fail!(
                Step,
                "a step at position {} was planned at length {}, and the sequence, of length \
                 {} now, has changed since: plan it again",
                plan.start,
                plan.length,
                self.length
            );
        }
        self.changes += 1;
        if plan.start == 0 {
            self.restart();
        }
        self.length = plan.end;
        let slide = |(group, state): (usize, &mut LayerGroup)| {
            let Move { from, to, .. } = state.slide(plan.end)?;
            Some(Move { group, from, to })
        };
        Ok(self.groups.iter_mut().enumerate().filter_map(slide).collect())
    }

    /// Removes the positions at or after `length`.
    ///
    /// # Errors
    /// [`Position`](crate::Status::Position) if `length` is negative, more than the current length, or
    /// neither 0 nor at least [`rewindable_to`](Self::rewindable_to).
    pub fn rewind(&mut self, length: i32) -> Result<()> {
        if length < 0 || length > self.length {
            fail!(
                Position,
                "cannot rewind to length {length}: the sequence has {} positions",
                self.length
            );
        }
        self.check_rewind(length)?;
        self.changes += 1;
        self.length = length;
        if length == 0 {
            self.restart();
        }
        Ok(())
    }

    fn check_rewind(&self, length: i32) -> Result<()> {
        let least = self.rewindable_to();
        if length < least && length != 0 {
            fail!(
                Position,
                "cannot rewind to length {length}: the window layers have dropped positions \
                 that a query there sees; rewind to 0, or to {least} or more"
            );
        }
        Ok(())
    }

    /// Removes every position.
    pub fn clear(&mut self) {
        self.changes += 1;
        self.length = 0;
        self.restart();
    }

    fn restart(&mut self) {
        self.groups.iter_mut().for_each(|group| group.dropped = 0);
    }
}

impl LayerGroup {
    fn rewindable_to(&self) -> i32 {
        match self.window {
            Some(window) if self.dropped > 0 => window.rewindable_to(window.sinks() + self.dropped),
            _ => 0,
        }
    }

    /// Drops the positions that a sequence of `length` positions no longer needs, if the layer group is full.
    fn slide(&mut self, length: i32) -> Option<Move> {
        let window = self.window.filter(|window| window.is_full(length - self.dropped))?;
        let first = window.first_needed(length).max(window.sinks());
        let from = first - self.dropped..length - self.dropped;
        self.dropped = first - window.sinks();
        let to = first - self.dropped..length - self.dropped;
        Some(Move { group: 0, from: Slots::Run(from), to: Slots::Run(to) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    fn of_length(capacity: i32, length: i32) -> ContiguousBookkeeping {
        ContiguousBookkeeping { length, ..ContiguousBookkeeping::new(capacity, [None]) }
    }

    fn run(start: i32, n: i32) -> Vec<i32> {
        (start..start + n).collect()
    }

    #[test]
    fn refuses_invalid_steps() {
        let book = of_length(10, 4);
        let status = |positions: &[i32]| book.plan(positions).unwrap_err().status();
        assert_eq!(status(&[]), Status::InvalidArgument);
        assert_eq!(status(&[-1]), Status::Position);
        assert_eq!(status(&[5]), Status::Position);
        assert_eq!(status(&[4, 6]), Status::Position);
        assert_eq!(status(&[4, 4]), Status::Position);
        assert_eq!(status(&[4, 3]), Status::Position);
        assert_eq!(status(&run(4, 7)), Status::Capacity);
        assert!(book.plan(&run(4, 6)).is_ok());
        assert_eq!(
            book.plan(&[6]).unwrap_err().message(),
            "position 6 leaves a gap: the next is 4"
        );
    }

    #[test]
    fn positions_near_the_largest_integer_do_not_overflow() {
        let book = of_length(i32::MAX, i32::MAX - 1);
        assert!(book.plan(&[i32::MAX - 1]).is_ok());
        let status = book.plan(&[i32::MAX - 1, i32::MAX]).unwrap_err().status();
        assert_eq!(status, Status::Capacity);
    }

    #[test]
    fn rewinds_within_the_sequence_only() {
        let mut book = of_length(10, 4);
        assert_eq!(book.rewind(5).unwrap_err().status(), Status::Position);
        assert_eq!(book.rewind(-1).unwrap_err().status(), Status::Position);
        assert_eq!(book.length(), 4);
        book.rewind(2).unwrap();
        assert_eq!(book.length(), 2);
    }
}
