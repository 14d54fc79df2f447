//! Converts the state of sequences and trees to that of a file, and back.

use std::collections::BTreeMap;
use std::ops::Range;

use super::group::LayerGroup;
use super::recurrent::Recurrent;
use super::tree::Tree;
use super::{check_sequence, CellsBookkeeping, MAX_SEQUENCES};
use crate::bookkeeping::{ContiguousBookkeeping, Slots, BLOCK};
use crate::error::Result;
use crate::snapshot::{damaged, CellsState, ContiguousState};

impl CellsBookkeeping {
    /// Returns the state. No step may be open. The declaration of the next step is omitted.
    pub fn state(&self) -> CellsState {
        CellsState {
            groups: self.groups.iter().map(|group| group.state()).collect(),
            trees: self.trees.iter().map(|(&sequence, tree)| tree.state(sequence)).collect(),
            recurrent: self.recurrent.as_ref().map(Recurrent::state),
            checkpoints: self.checkpoints.state(),
        }
    }

    /// Returns bookkeeping with this state, and with the same capacity and layer groups as `self`.
    ///
    /// # Errors
    /// [`File`](crate::Status::File) for a state that no steps produce or that does not fit;
    /// [`Backend`](crate::Status::Backend) if there is too little memory.
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
            (None, None) => {
                let has_state = |tree: &Tree| !tree.rows.is_empty() || !tree.anchors.is_empty();
                if trees.values().any(has_state) {
                    return Err(damaged("a tree has rows of recurrent layers"));
                }
                None
            }
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

    /// Refuses a state that no steps produce. For example, a window must not have positions that their sequence lacks.
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
        // Returns whether a query at `position` of `text` sees a position that `owner` lacks. Windows need no
        // positions that were removed from the text.
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
            let ends = |&text: &i32| full.cell_of(text, kept.position - 1).is_none();
            let lacks = |&text: &i32| lacks(kept.owner, text, kept.position);
            let follows = |group: &LayerGroup| group.held(kept.owner).next() > kept.position;
            if kept.members.iter().any(ends)
                || kept.members.iter().any(lacks)
                || windows.iter().any(follows)
            {
                return Err(damaged(format_args!(
                    "the checkpoint at {} lacks rows or has later rows, or its sequence lacks the position before it",
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
            let next = self.next(sequence);
            let after = |&node: &usize| next + tree.depth(node) + 1;
            if tree.anchors.keys().any(|node| after(node) % BLOCK != 0) {
                return Err(damaged("an anchor of a tree lies between boundaries"));
            }
            // The step that ran a node at a boundary also stored the anchor there.
            let lacks = |node: usize| match tree.parent(node) {
                Some(parent) => !tree.anchors.contains_key(&parent),
                None => !recurrent.has_anchor(sequence, next),
            };
            let at_boundary = |&node: &usize| (next + tree.depth(node)) % BLOCK == 0;
            if (0..tree.n_written()).filter(at_boundary).any(lacks) {
                return Err(damaged(format_args!(
                    "the tree of sequence {sequence} lacks an anchor"
                )));
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

    /// Moves the rows and anchors of recurrent layers to the first slots, and keeps their order. In a file, rows and
    /// anchors may be scattered. The buffers of a cache extend to the last of them.
    pub fn pack_recurrent(&mut self) {
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.pack(&mut self.trees);
        }
    }

    /// Refuses the state of a contiguous cache if no steps produce it, or it does not fit.
    ///
    /// # Errors
    /// [`File`](crate::Status::File).
    pub fn check_contiguous(&self, state: &ContiguousState) -> Result<()> {
        let windows = self.groups.iter().map(|group| group.window);
        ContiguousBookkeeping::new(self.capacity, windows).with_state(state).map(drop)
    }

    /// Returns the number of layer groups. With recurrent layers, their rows and their anchors count as one group
    /// each.
    pub fn n_groups(&self) -> usize {
        self.groups.len() + if self.recurrent.is_some() { 2 } else { 0 }
    }

    /// Returns the sinks and the cells of each layer group.
    pub fn layouts(&self) -> Vec<(i32, i32)> {
        let sinks = |group: &LayerGroup| group.window.map_or(0, |window| window.sinks());
        self.groups.iter().map(|group| (sinks(group), group.size())).collect()
    }

    /// Returns the cells of a layer group that have owners, in order.
    ///
    /// # Panics
    /// If the layer group does not exist.
    pub fn held_cells(&self, group: usize) -> Slots {
        Slots::of(&self.cells_of(group).owned_cells())
    }
}
