//! What the bookkeeping must satisfy after each operation, by the model.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Range, RangeInclusive};

use etkv_core::bookkeeping::{CellsBookkeeping, LayerGroupPlan, MaskPlan, Slots};
use etkv_core::{LayerPolicy, Status};
use etkv_tests::kept::width;
use etkv_tests::model::{is_seen, Members};
use etkv_tests::slots::Id;

use super::Run;

/// The number of free cells after a sequence. Each of them counts as much as a move.
const ROOM: i32 = 64;

impl Run {
    pub(super) fn check(&self) {
        (0..self.groups.len()).for_each(|group| self.check_used(group));
        let live: Vec<i32> = self.model.sequences().keys().copied().collect();
        assert_eq!(self.book.sequences(), live);
        assert_eq!(self.book.length(), self.model.live().len() as i32);
        let free = self.model.free();
        for n in [i32::MIN, -1, 0, 1, free, free + 1, i32::MAX] {
            assert_eq!(self.book.can_extend(n), (0..=free).contains(&n), "{n} of {free}");
        }
        for (&sequence, held) in self.model.sequences() {
            assert_eq!(self.book.seq_len(sequence).unwrap(), held.tokens.len() as i32);
            assert_eq!(self.book.seq_next(sequence).unwrap(), self.model.next(sequence));
            assert_eq!(self.book.tree_len(sequence).unwrap(), held.tree.len());
            let ranges = self.book.seq_positions(sequence).unwrap();
            assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start), "{ranges:?}");
            let positions: Vec<i32> = ranges.into_iter().flatten().collect();
            assert_eq!(positions, self.model.positions_of(sequence));
            let least = self.least(sequence);
            assert_eq!(self.book.rewindable_to(sequence).unwrap(), least, "sequence {sequence}");
        }
    }

    /// Checks the number of used slots. It is at least the number of slots that the next query of each sequence sees,
    /// plus the nodes of trees. It is at most the window's positions of each sequence, plus the nodes.
    fn check_used(&self, group: usize) {
        let live = self.model.live().len() as i32;
        let used = self.book.used(group);
        let policy = self.policies[group];
        if policy == LayerPolicy::Full {
            return assert_eq!(used, live);
        }
        let (window, sinks) = width(policy);
        let (mut seen, mut nodes, mut most) = (BTreeSet::new(), 0, 0);
        for (&sequence, held) in self.model.sequences() {
            let at = self.model.next(sequence);
            let is_seen = |id: &Id| is_seen(policy, at, self.model.position(*id));
            seen.extend(held.tokens.iter().copied().filter(is_seen));
            nodes += held.written() as i32;
            let slides = self.windows[group - 1].slides();
            let promised = sinks + window - 1 + self.windows[group - 1].max_step_tokens();
            most += (held.tokens.len() as i32).min(if slides { promised } else { i32::MAX });
        }
        let least = seen.len() as i32 + nodes;
        let range = least..=(most + nodes).min(live);
        assert!(range.contains(&used), "group {group}: {used} of {range:?}");
    }

    pub(super) fn check_contiguous(&self) {
        for (&sequence, held) in self.model.sequences() {
            let is_held = |id: &Option<Id>| id.is_some_and(|id| held.tokens.contains(&id));
            let slots = self.groups[0].ids();
            let first = slots.iter().position(is_held).unwrap_or(0);
            let run = slots[first..].iter().take_while(|id| is_held(id)).count();
            let is_run = run == held.tokens.len();
            assert_eq!(self.book.is_contiguous(sequence).unwrap(), is_run, "{sequence}");
        }
    }

    pub(super) fn check_same(&self, before: &CellsBookkeeping) {
        let answers = |book: &CellsBookkeeping| {
            let fit = (-1..=self.model.capacity + 1).filter(|&n| book.can_extend(n)).max();
            (book.length(), fit, book.sequences())
        };
        assert_eq!(answers(before), answers(&self.book));
        for sequence in before.sequences() {
            let ranges = [before, &self.book].map(|book| book.seq_positions(sequence).unwrap());
            assert_eq!(ranges[0], ranges[1]);
            assert_eq!(before.rewindable_to(sequence), self.book.rewindable_to(sequence));
            assert_eq!(before.is_contiguous(sequence), self.book.is_contiguous(sequence));
        }
        for group in 0..self.groups.len() {
            assert_eq!(before.used(group), self.book.used(group));
        }
    }

    /// Checks the rows that a query of a sequence at `least` sees: they must be where they were written or moved.
    pub(super) fn check_held_at(&self, sequence: i32, least: i32) {
        for (&policy, slots) in self.policies.iter().zip(&self.groups) {
            for id in self.model.sequence(sequence).tokens {
                let at = self.model.position(id);
                if at < least && is_seen(policy, least, at) {
                    assert!(slots.slot_of(id).is_some(), "position {at} is missing at {least}");
                }
            }
        }
    }

    /// Checks that every sequence continues directly after its own cells, if all its tokens fit there. Otherwise the
    /// tokens that do not fit must be in one run of cells, if a free run is long enough. It must be the first such
    /// run, unless a sequence continues there.
    pub(super) fn check_cells(&self, owners: &[Members], write: &Slots) {
        let live = self.model.live();
        let is_live = |id: &Option<Id>| id.is_some_and(|id| live.contains(&id));
        let taken: Vec<bool> = self.groups[0].ids().iter().map(is_live).collect();
        let is_free = |mut cells: Range<usize>| cells.all(|at| taken.get(at) == Some(&false));
        let mut shares: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
        for (members, cell) in owners.iter().zip(write.iter()) {
            let &[sequence] = &members[..] else {
                return;
            };
            shares.entry(sequence).or_default().push(cell);
        }
        let cells_after = |(sequence, cells): (&i32, &Vec<i32>)| {
            let start = self.tail(*sequence)? + 1;
            Some(start..start + cells.len())
        };
        if let Some(mut wanted) = shares.iter().map(cells_after).collect::<Option<Vec<_>>>() {
            wanted.sort_unstable_by_key(|cells| cells.start);
            let apart = wanted.windows(2).all(|pair| pair[0].end <= pair[1].start);
            if apart && wanted.iter().cloned().all(is_free) {
                for share in &shares {
                    let wanted = cells_after(share).unwrap();
                    let expected = Slots::Run(wanted.start as i32..wanted.end as i32);
                    assert_eq!(
                        Slots::of(share.1),
                        expected,
                        "{share:?}, all of it fits after the sequence"
                    );
                }
            }
        }
        let (Some((&sequence, cells)), 1) = (shares.first_key_value(), shares.len()) else {
            return;
        };
        let start = self.tail(sequence).map_or(taken.len(), |tail| tail + 1);
        let fits = (0..=cells.len()).rev().find(|&n| is_free(start..start + n)).unwrap_or(0);
        let rest = cells.len() - fits;
        let fitting = start..start + fits;
        let is_run = |from: usize| {
            let run = from..from + rest;
            is_free(run.clone()) && (run.end <= fitting.start || fitting.end <= run.start)
        };
        if let Some(from) = (0..taken.len()).find(|&from| is_run(from)) {
            if start < taken.len() && rest > 0 {
                let goes_on_at = |at: usize| {
                    at == fitting.end
                        || self.model.sequences().keys().any(|&one| self.end(one) == Some(at))
                };
                let at = cells[fits] as usize;
                let begins = |at: usize| at == 0 || !is_run(at - 1) || at == fitting.end;
                if from == 0 || !goes_on_at(from) {
                    assert_eq!(at, from, "{cells:?} are not in the first run");
                } else {
                    let is_apart = at >= 16 && begins(at - 16);
                    assert!(begins(at) || is_apart, "{cells:?} begin within a run");
                }
            }
            let breaks = cells.windows(2).filter(|pair| pair[1] != pair[0] + 1).count();
            let most = usize::from(fits > 0 && rest > 0);
            assert!(breaks <= most, "{cells:?}, but {fits} fit after the sequence");
        }
    }

    /// Checks the range of cells that a step reads: sequences of the step must have or write the range's first and
    /// last cell. Checks that a step of one sequence in one run needs no mask if the last query sees the whole run.
    pub(super) fn check_read(
        &self,
        group: usize,
        plan: &LayerGroupPlan,
        owners: &[Members],
        ids: &[Id],
    ) {
        let slots = self.groups[group].ids();
        let (start, end) = (plan.read.start as usize, plan.read.end as usize);
        let members: BTreeSet<i32> = owners.iter().flatten().copied().collect();
        let held = members.iter().flat_map(|&sequence| self.model.sequence(sequence).all());
        let known: Vec<Id> = held.chain(ids.iter().copied()).collect();
        for edge in [start, end - 1] {
            let is_known = slots[edge].is_some_and(|id| known.contains(&id));
            assert!(is_known, "group {group} reads slot {edge} without need: {plan:?}");
        }
        let (Some(&sequence), 1) = (members.first(), members.len()) else {
            return;
        };
        let Some(first) = end.checked_sub(known.len()) else {
            return;
        };
        let mut run: Vec<Id> = slots[first..end].iter().flatten().copied().collect();
        // The cells of nodes and of the step's tokens must be in order. The cells before them need not be in order.
        let n_tokens = self.model.sequence(sequence).tokens.len();
        let is_tail_in_order = run.get(n_tokens..) == Some(&known[n_tokens..]);
        run.sort_unstable();
        let seen = || self.model.visible(self.policies[group], owners, ids, ids.len() - 1);
        let is_known = known.iter().all(|id| run.binary_search(id).is_ok());
        if is_known && is_tail_in_order && seen() == run {
            let mask = if ids.len() == 1 { MaskPlan::None } else { MaskPlan::Causal };
            assert_eq!((&plan.mask, plan.read.len()), (&mask, run.len()), "group {group}");
        }
    }

    /// Returns the cell after the last one of a sequence, without its tree.
    fn end(&self, sequence: i32) -> Option<usize> {
        let held = self.model.sequences().get(&sequence)?;
        let cells: Vec<usize> =
            held.tokens.iter().filter_map(|&id| self.groups[0].slot_of(id)).collect();
        let last = if self.book.is_contiguous(sequence).unwrap() {
            cells.iter().max()
        } else {
            cells.last()
        };
        last.map(|&last| last + 1)
    }

    /// Returns the cell of the last node of a sequence's tree in the first layer group. Without a tree, returns the
    /// last cell if the sequence is one run, else the cell of the sequence's last token.
    fn tail(&self, sequence: i32) -> Option<usize> {
        let held = self.model.sequences().get(&sequence)?;
        let last = *held.all().last()?;
        if held.written() > 0 || !self.book.is_contiguous(sequence).unwrap() {
            return self.groups[0].slot_of(last);
        }
        held.tokens.iter().filter_map(|&id| self.groups[0].slot_of(id)).max()
    }

    /// Checks that every call except commit and abort is refused while a step is open.
    pub(super) fn refuses_in_step(&mut self) {
        let book = &mut self.book;
        let refused = [
            book.plan(&[0]).map(drop),
            book.begin_step(&[0]),
            book.begin_step_shared(&[&[0, 1]]),
            book.cancel_step(),
            book.seq_cp(0, 1, 0..i32::MAX),
            book.seq_rm(0, 0..i32::MAX),
            book.seq_keep(0),
            book.propose(0, &[-1]),
            book.commit_tree(0, &[]).map(drop),
            book.compact().map(drop),
        ];
        for result in refused {
            assert_eq!(result.unwrap_err().status(), Status::Step);
        }
    }

    /// Returns the minimum and maximum number of rows that a compaction should move in a layer group. Returns `None`
    /// if several sequences are not runs, or if sequences share cells. The sequence that is not a run becomes a run
    /// next to the others, with some room after it. Other sequences move instead if that needs fewer moves, or leaves
    /// more room.
    pub(super) fn fewest(&self, group: usize) -> Option<RangeInclusive<usize>> {
        let sequences = self.model.sequences();
        let slots: Vec<Vec<i32>> = sequences
            .iter()
            .map(|(&sequence, held)| {
                let kept = |id: &&Id| group == 0 || self.kept[group - 1].holds(sequence, **id);
                let slot = |&id: &Id| self.groups[group].slot_of(id).unwrap() as i32;
                held.tokens.iter().filter(kept).map(slot).collect()
            })
            .collect();
        let taken: BTreeSet<i32> = slots.iter().flatten().copied().collect();
        let all: usize = slots.iter().map(Vec::len).sum();
        if taken.len() < all || sequences.values().any(|held| !held.tree.is_empty()) {
            return None;
        }
        let stays = |slots: &[i32], start: i32| {
            let end = start + slots.len() as i32;
            // Windows are read without a mask only if positions are in order.
            let stays = |(slot, place): &(&i32, i32)| match group {
                0 => (start..end).contains(*slot),
                _ => *slot == place,
            };
            slots.iter().zip(start..).filter(stays).count()
        };
        let is_run = |slots: &&Vec<i32>| {
            let start = slots.iter().copied().min().unwrap_or(0);
            stays(slots, start) == slots.len()
        };
        let broken: Vec<&Vec<i32>> = slots.iter().filter(|slots| !is_run(slots)).collect();
        let &[broken] = &broken[..] else {
            return broken.is_empty().then_some(0..=0);
        };
        // A layer group with several sequences may have grown.
        if group > 0 && slots.iter().filter(|slots| !slots.is_empty()).count() > 1 {
            return None;
        }
        let (len, size) = (broken.len() as i32, self.model.capacity);
        let end = size - ROOM.min((size - all as i32) / 2);
        let foreign = |cell: i32| taken.contains(&cell) && !broken.contains(&cell);
        let starts = (0..=end - len).filter(|&start| !(start..start + len).any(foreign));
        let most = starts.map(|start| (stays(broken, start), -start)).max()?;
        let fewest = broken.len() - most.0;
        match all == broken.len() {
            true if group == 0 => Some(fewest..=fewest),
            true if len - most.1 + ROOM <= self.kept[group - 1].slots() => Some(fewest..=fewest),
            true => None,
            false => Some(1..=fewest + ROOM as usize),
        }
    }
}
