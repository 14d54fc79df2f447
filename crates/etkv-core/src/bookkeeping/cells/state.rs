//! The state of sequences and trees, in a file and back.

use std::collections::BTreeMap;

use super::group::LayerGroup;
use super::tree::Tree;
use super::{check_sequence, CellsBookkeeping};
use crate::bookkeeping::Slots;
use crate::error::Result;
use crate::snapshot::{damaged, CellsState};

impl CellsBookkeeping {
    /// Returns the state. No step is open; what is declared for the next is left out.
    pub fn state(&self) -> CellsState {
        CellsState {
            groups: self.groups.iter().map(|group| group.state()).collect(),
            trees: self.trees.iter().map(|(&sequence, tree)| tree.state(sequence)).collect(),
        }
    }

    /// Returns bookkeeping of the same capacity and layer groups in another state.
    ///
    /// # Errors
    /// [`File`](crate::Status::File) for a state that no steps lead to, or one that does not fit;
    /// [`Backend`](crate::Status::Backend) if there is no memory.
    pub fn with_state(&self, state: &CellsState) -> Result<Self> {
        let n_groups = self.groups.len();
        if state.groups.len() != n_groups {
            let found = state.groups.len();
            return Err(damaged(format_args!("it has {found} layer groups of {n_groups}")));
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
        for group in &groups[1..] {
            if !groups[0].covers(group) || group.taken() > groups[0].taken() {
                return Err(damaged("a window holds positions that their sequence lacks"));
            }
        }
        let cells = vec![Vec::new(); n_groups];
        Ok(Self { groups, trees, cells, ..Self::new(self.capacity, []) })
    }

    /// Returns the number of layer groups.
    pub fn n_groups(&self) -> usize {
        self.groups.len()
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
        Slots::of(&self.groups[group].owned_cells())
    }
}
