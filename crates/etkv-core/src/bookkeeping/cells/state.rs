//! The state of sequences and trees, in a file and back.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::group::LayerGroup;
use super::recurrent::Recurrent;
use super::tree::Tree;
use super::{check_sequence, CellsBookkeeping, MAX_SEQUENCES};
use crate::bookkeeping::{ContiguousBookkeeping, Slots, BLOCK};
use crate::error::{fail, Result};
use crate::snapshot::{
    damaged, CellsState, ContiguousState, GroupState, RecurrentState, SequenceState,
};

impl CellsBookkeeping {
    /// Returns the state. No step may be open. The declaration of the next step is left out.
    pub fn state(&self) -> CellsState {
        CellsState {
            groups: self.groups.iter().map(|group| group.state()).collect(),
            trees: self.trees.iter().map(|(&sequence, tree)| tree.state(sequence)).collect(),
            recurrent: self.recurrent.as_ref().map(Recurrent::state),
            checkpoints: self.checkpoints.state(),
        }
    }

    /// Returns bookkeeping of the same capacity and layer groups with this state.
    ///
    /// # Errors
    /// [`File`](crate::Status::File) for a state that no sequence of steps produces, or that does not fit;
    /// [`Backend`](crate::Status::Backend) if memory is lacking.
    pub fn with_state(&self, state: &CellsState) -> Result<Self> {
        let n_groups = self.groups.len();
        if state.groups.len() != n_groups {
            let found = state.groups.len();
            return Err(damaged(format_args!("it has {found} layer groups, expected {n_groups}")));
        }
        let mut trees = BTreeMap::new();
        let mut before = -1;
        for tree in &state.trees {
            check_sequence(tree.sequence).map_err(damaged)?;
            if tree.sequence <= before {
                return Err(damaged(format_args!("tree {} follows {before}", tree.sequence)));
            }
            before = tree.sequence;
            trees.insert(tree.sequence, Tree::of_state(tree, n_groups)?);
        }
        let mut groups = Vec::new();
        for (index, (group, state)) in self.groups.iter().zip(&state.groups).enumerate() {
            let nodes: Vec<i32> =
                trees.values().flat_map(|tree: &Tree| tree.cells[index].iter().copied()).collect();
            groups.push(group.with_state(state, &nodes)?);
        }
        let recurrent = match (&self.recurrent, &state.recurrent) {
            (None, None) => None,
            (Some(recurrent), Some(state)) => Some(recurrent.with_state(state, &trees)?),
            (None, Some(_)) => return Err(damaged("it has the cells of recurrent layers")),
            (Some(_), None) => return Err(damaged("it lacks the cells of recurrent layers")),
        };
        let mut checkpoints = self.checkpoints.clone();
        checkpoints.load(&state.checkpoints)?;
        let cells = vec![Vec::new(); n_groups];
        let book =
            Self { groups, recurrent, checkpoints, trees, cells, ..Self::new(self.capacity, []) };
        book.check_windows()?;
        Ok(book)
    }

    /// Refuses layer groups that hold positions their sequences lack, and states that no steps produce.
    fn check_windows(&self) -> Result<()> {
        let (full, windows) = (&self.groups[0], &self.groups[1..]);
        let kept_by = |owner: i32| self.checkpoints.all().iter().find(|kept| kept.owner == owner);
        let is_covered = |group: &LayerGroup, owner: i32| {
            let lacks = |sequence: i32| {
                group.held(owner).last_missing_in(full.held(sequence), &(0..i32::MAX)).is_some()
            };
            match kept_by(owner) {
                Some(kept) => !kept.members.iter().any(|&member| lacks(member)),
                None => owner < MAX_SEQUENCES && !lacks(owner),
            }
        };
        let rows = self.recurrent.iter().map(|recurrent| &recurrent.rows);
        for group in windows.iter().chain(rows) {
            let covered = group.owners().all(|owner| is_covered(group, owner));
            if !covered || group.taken() > full.taken() {
                return Err(damaged("a window holds positions that their sequence lacks"));
            }
        }
        // What a query at `position` of a text sees and `owner` does not hold. Positions that were removed from the
        // text are in no window either.
        let lacks = |owner: i32, text: i32, position: i32| {
            windows.iter().filter_map(|group| Some((group, group.window?))).any(
                |(group, window)| {
                    let seen = window.first_seen(position)..position;
                    let lacks = |seen: &Range<i32>| {
                        full.held(text).last_missing_in(group.held(owner), seen).is_some()
                    };
                    lacks(&seen) || lacks(&(0..window.sinks().min(position)))
                },
            )
        };
        for kept in self.checkpoints.all() {
            let behind = kept.members.iter().any(|&member| self.next(member) < kept.position);
            if behind || kept.members.iter().any(|&text| lacks(kept.owner, text, kept.position)) {
                return Err(damaged(format_args!(
                    "the checkpoint at {} lacks rows, or its sequence ends before it",
                    kept.position
                )));
            }
        }
        if let Some(owner) = full.owners().find(|&owner| lacks(owner, owner, self.next(owner))) {
            return Err(damaged(format_args!("a window lacks positions of sequence {owner}")));
        }
        if full.owners().any(|owner| owner >= MAX_SEQUENCES) {
            return Err(damaged("a checkpoint holds the positions of a sequence"));
        }
        let Some(recurrent) = &self.recurrent else {
            return Ok(());
        };
        for (&sequence, tree) in &self.trees {
            let after = |&node: &usize| self.next(sequence) + tree.depth(node) + 1;
            if tree.anchors.keys().any(|node| after(node) % BLOCK != 0) {
                return Err(damaged("an anchor of a tree lies between boundaries"));
            }
        }
        let kept = self.checkpoints.all().iter().map(|kept| kept.owner);
        for owner in recurrent.anchors.owners().chain(full.owners()).chain(kept) {
            let (next, whole) = match kept_by(owner) {
                Some(kept) => (kept.position, kept.position % BLOCK == 0),
                None if owner < MAX_SEQUENCES => {
                    (self.next(owner), full.held(owner).count() == self.next(owner))
                }
                None => return Err(damaged(format_args!("anchors belong to {owner}"))),
            };
            if !whole || !recurrent.is_whole(owner, next) {
                return Err(damaged(format_args!(
                    "the state of sequence {owner} after {next} positions lacks rows or anchors"
                )));
            }
        }
        Ok(())
    }

    /// Moves the rows and anchors of recurrent layers to the first slots, in their order. A file may have a few of
    /// them anywhere, and the buffers of a cache reach up to the last.
    pub fn pack_recurrent(&mut self) {
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.pack(&mut self.trees);
        }
    }

    /// Returns the state of bookkeeping that holds this sequence only, as sequence 0, in the first cells in
    /// the order of its positions. Its tree is left out.
    pub fn sequence_state(&self, sequence: i32) -> CellsState {
        let of = |group: &LayerGroup| {
            let mut cell = 0;
            let runs = group.held(sequence).iter().map(|run| {
                let first = cell;
                cell += run.len;
                [run.position, first, run.len]
            });
            let runs: Vec<[i32; 3]> = runs.collect();
            let size = group.emptied().size().max(cell);
            let held = (cell > 0).then_some(SequenceState { sequence: 0, runs });
            GroupState { size, sequences: held.into_iter().collect() }
        };
        let recurrent = self.recurrent.as_ref();
        CellsState {
            groups: self.groups.iter().map(of).collect(),
            trees: Vec::new(),
            recurrent: recurrent.map(|recurrent| RecurrentState {
                rows: of(&recurrent.rows),
                anchors: of(&recurrent.anchors),
            }),
            checkpoints: Vec::new(),
        }
    }

    /// Returns the cells of a sequence in a layer group, in the order of its positions.
    ///
    /// # Panics
    /// If the layer group does not exist.
    pub fn sequence_cells(&self, group: usize, sequence: i32) -> Slots {
        Slots::of(&self.cells_of(group).held(sequence).cells().collect::<Vec<_>>())
    }

    /// Returns bookkeeping that also holds the only sequence of a state, which [fits](Self::with_state),
    /// under a number that has neither positions nor a tree. Also returns its cells in each layer group, in
    /// the order of the cells of the state.
    ///
    /// # Errors
    /// [`Capacity`](crate::Status::Capacity) if too few cells are free. [`Step`](crate::Status::Step) while a
    /// step is open. [`InvalidArgument`](crate::Status::InvalidArgument) for a number out of range.
    pub fn with_sequence(&self, sequence: i32, state: &CellsState) -> Result<(Self, Vec<Slots>)> {
        self.refuse_in_step("load a sequence")?;
        check_sequence(sequence)?;
        let mut book = self.clone();
        let mut owners: BTreeMap<i32, i32> = BTreeMap::new();
        for kept in &state.checkpoints {
            let added = book.checkpoints.add(kept.position, vec![sequence]);
            owners.extend(added.map(|owner| (kept.owner, owner)));
        }
        let mut all = Vec::new();
        let n_attention = book.groups.len();
        let recurrent =
            book.recurrent.iter_mut().flat_map(|state| [&mut state.rows, &mut state.anchors]);
        let states = state.recurrent.iter().flat_map(|state| [&state.rows, &state.anchors]);
        let groups = book.groups.iter_mut().chain(recurrent);
        for (index, (group, state)) in groups.zip(state.groups.iter().chain(states)).enumerate() {
            // In the order of the sequence's positions; what only checkpoints hold comes last.
            let mut order: Vec<i32> = Vec::new();
            let mut known: BTreeSet<i32> = BTreeSet::new();
            for &[_, cell, len] in state.sequences.iter().flat_map(|held| &held.runs) {
                order.extend((cell..cell + len).filter(|&cell| known.insert(cell)));
            }
            let (n, free) = (order.len() as i32, group.free_cells());
            if n > free {
                fail!(
                    Capacity,
                    "the sequence takes {n} cells, {free} of {} are free; remove others first",
                    self.capacity
                );
            }
            let mut cells = Vec::new();
            if index < n_attention {
                group.allocate(n, None, &mut cells);
            } else {
                group.allocate_first(n, &mut cells);
            }
            let mut moved: Vec<(i32, i32)> =
                order.iter().copied().zip(cells.iter().copied()).collect();
            let target: BTreeMap<i32, i32> = moved.iter().copied().collect();
            for held in &state.sequences {
                let owner = match held.sequence {
                    0..MAX_SEQUENCES => Some(sequence),
                    kept => owners.get(&kept).copied(),
                };
                let runs = held.runs.iter().filter(|_| owner.is_some());
                for &[position, cell, len] in runs {
                    for at in 0..len {
                        let cell = target.get(&(cell + at)).copied().unwrap_or_default();
                        group.append(owner.unwrap_or_default(), position + at, cell);
                    }
                }
            }
            // Cells of checkpoints for which there is no room.
            let unowned = cells.into_iter().filter(|&cell| group.n_owners(cell) == 0);
            unowned.collect::<Vec<_>>().into_iter().for_each(|cell| group.free(cell));
            moved.sort_unstable();
            all.push(Slots::of(&moved.iter().map(|&(_, to)| to).collect::<Vec<_>>()));
        }
        Ok((book, all))
    }

    /// Refuses a state of one growing sequence that no steps produce, or that does not fit.
    ///
    /// # Errors
    /// [`File`](crate::Status::File).
    pub fn check_contiguous(&self, state: &ContiguousState) -> Result<()> {
        let windows = self.groups.iter().map(|group| group.window);
        ContiguousBookkeeping::new(self.capacity, windows).with_state(state).map(drop)
    }

    /// Returns the number of layer groups, with the rows and the anchors of recurrent layers.
    pub fn n_groups(&self) -> usize {
        self.groups.len() + if self.recurrent.is_some() { 2 } else { 0 }
    }

    /// Returns the sinks and the cells of each layer group.
    pub fn layouts(&self) -> Vec<(i32, i32)> {
        let sinks = |group: &LayerGroup| group.window.map_or(0, |window| window.sinks());
        self.groups.iter().map(|group| (sinks(group), group.size())).collect()
    }

    /// Returns the cells of a layer group that hold rows, in order.
    ///
    /// # Panics
    /// If the layer group does not exist.
    pub fn held_cells(&self, group: usize) -> Slots {
        Slots::of(&self.cells_of(group).owned_cells())
    }
}
