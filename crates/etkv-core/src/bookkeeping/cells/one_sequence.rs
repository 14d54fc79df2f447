//! Saves and loads one of several sequences, with its checkpoints.

use std::collections::{BTreeMap, BTreeSet};

use super::runs::{Run, Runs};
use super::{check_sequence, CellsBookkeeping, MAX_SEQUENCES};
use crate::bookkeeping::Slots;
use crate::error::{fail, Result};
use crate::snapshot::{CellsState, CheckpointState, GroupState, RecurrentState, SequenceState};

impl CellsBookkeeping {
    /// Returns a state that has only this sequence, as sequence 0, and the sequence's checkpoints. Both are moved to
    /// the first cells. The sequence's tree is omitted.
    pub fn sequence_state(&self, sequence: i32) -> CellsState {
        let mut checkpoints: Vec<CheckpointState> = self.checkpoints.state();
        checkpoints.retain(|kept| kept.sequences.contains(&sequence));
        checkpoints.iter_mut().for_each(|kept| kept.sequences = vec![0]);
        let of = |group: usize| {
            let cells = self.cells_of_text(group, sequence);
            let state = self.cells_of(group);
            let size = state.emptied().size().max(cells.len() as i32);
            let places: BTreeMap<i32, i32> = cells.into_iter().zip(0..).collect();
            let place = |cell: i32| places.get(&cell).copied().unwrap_or_default();
            let held = self.owners_of_text(sequence).into_iter().filter_map(|owner| {
                let mut runs = Runs::default();
                for run in state.held(owner).iter() {
                    for (position, cell) in run.positions().zip(run.cells()) {
                        runs.push(Run { position, cell: place(cell), len: 1 });
                    }
                }
                let number = if owner == sequence { 0 } else { owner };
                let runs: Vec<[i32; 3]> =
                    runs.iter().map(|run| [run.position, run.cell, run.len]).collect();
                (!runs.is_empty()).then_some(SequenceState { sequence: number, runs })
            });
            GroupState { size, sequences: held.collect() }
        };
        let n = self.groups.len();
        CellsState {
            groups: (0..n).map(of).collect(),
            trees: Vec::new(),
            recurrent: self
                .recurrent
                .is_some()
                .then(|| RecurrentState { rows: of(n), anchors: of(n + 1) }),
            checkpoints,
        }
    }

    /// Returns the sequence, and the owners of its checkpoints, ascending.
    fn owners_of_text(&self, sequence: i32) -> Vec<i32> {
        let kept = self.checkpoints.all().iter().filter(|kept| kept.members.contains(&sequence));
        let mut owners: Vec<i32> =
            std::iter::once(sequence).chain(kept.map(|kept| kept.owner)).collect();
        owners.sort_unstable();
        owners
    }

    /// Returns the cells of a sequence in a layer group, in the order of its positions. The cells that only its
    /// checkpoints own follow.
    fn cells_of_text(&self, group: usize, sequence: i32) -> Vec<i32> {
        let group = self.cells_of(group);
        let mut known = BTreeSet::new();
        let owners = self.owners_of_text(sequence);
        let all = owners.into_iter().flat_map(|owner| group.held(owner).cells());
        all.filter(|&cell| known.insert(cell)).collect()
    }

    /// Returns the cells of a sequence and of its checkpoints in a layer group, in the order of their
    /// [state](Self::sequence_state).
    ///
    /// # Panics
    /// If the layer group does not exist.
    pub fn sequence_cells(&self, group: usize, sequence: i32) -> Slots {
        Slots::of(&self.cells_of_text(group, sequence))
    }

    /// Returns a copy of the bookkeeping with one more sequence: the only sequence of `state`, which must
    /// [fit](Self::with_state). The sequence gets the number `sequence`. No sequence with this number may hold
    /// positions or a tree. Also returns the sequence's cells in each layer group, in the order in which `state` lists
    /// them.
    ///
    /// # Errors
    /// [`Capacity`](crate::Status::Capacity) if too few cells are free. [`Step`](crate::Status::Step) while a step is
    /// open. [`InvalidArgument`](crate::Status::InvalidArgument) for a sequence number out of range.
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
            // The cells are in the order of the sequence's positions. Cells that only checkpoints own follow.
            let mut order: Vec<i32> = Vec::new();
            let mut known: BTreeSet<i32> = BTreeSet::new();
            for &[_, cell, len] in state.sequences.iter().flat_map(|held| &held.runs) {
                order.extend((cell..cell + len).filter(|&cell| known.insert(cell)));
            }
            let (n, free) = (order.len() as i32, group.free_cells());
            if n > free {
                fail!(
                    Capacity,
                    "the sequence needs {n} cells, but {free} of {} are free; remove other sequences first",
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
            // Frees cells of checkpoints for which there is no room.
            let unowned = cells.into_iter().filter(|&cell| group.n_owners(cell) == 0);
            unowned.collect::<Vec<_>>().into_iter().for_each(|cell| group.free(cell));
            moved.sort_unstable();
            all.push(Slots::of(&moved.iter().map(|&(_, to)| to).collect::<Vec<_>>()));
        }
        Ok((book, all))
    }
}
