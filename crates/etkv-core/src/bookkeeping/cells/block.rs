//! A block: the cells of one sequence and its tree. Compaction moves a block into one run.

use std::collections::BTreeMap;

use super::group::LayerGroup;

/// The cells of one sequence, by position, and the cells of the tree after it.
pub struct Block<'a> {
    pub cells: Vec<i32>,
    pub nodes: &'a [i32],
    /// Whether the cells must be in the order of their positions.
    pub ordered: bool,
    /// Whether other sequences also own some of the cells.
    pub shares: bool,
    /// The lowest of `cells`, or of `nodes` if `cells` is empty.
    pub start: i32,
    /// Whether `cells` are one run (in order if `ordered`) and the nodes follow that run in order.
    pub is_run: bool,
}

impl<'a> Block<'a> {
    /// Returns the blocks of all sequences that have cells of a layer group or a tree.
    pub fn all(group: &LayerGroup, trees: &'a [(i32, Vec<i32>)], ordered: bool) -> Vec<Self> {
        let mut sequences: Vec<i32> = group.owners().collect();
        sequences.extend(trees.iter().map(|(sequence, _)| *sequence));
        sequences.sort_unstable();
        sequences.dedup();
        let block = |sequence: i32| {
            let tree = trees.iter().find(|(owner, _)| *owner == sequence);
            let nodes = tree.map_or(&[][..], |(_, nodes)| nodes);
            let cells: Vec<i32> = group.held(sequence).cells().collect();
            let shares = cells.iter().any(|&cell| group.n_owners(cell) > 1);
            Self::of(cells, nodes, ordered, shares)
        };
        sequences.into_iter().filter_map(block).collect()
    }

    fn of(cells: Vec<i32>, nodes: &'a [i32], ordered: bool, shares: bool) -> Option<Self> {
        let extent = if cells.is_empty() { nodes } else { &cells };
        let (start, last) = (extent.iter().copied().min()?, extent.iter().copied().max()?);
        let end = start + cells.len() as i32;
        let is_run = (cells.is_empty() || last == end - 1)
            && (!ordered || cells.iter().zip(start..).all(|(&cell, place)| cell == place))
            && nodes.iter().zip(end..).all(|(&node, place)| node == place);
        Some(Self { cells, nodes, ordered, shares, start, is_run })
    }

    /// Returns whether the cells are one run after each cell has moved to its `target`.
    pub fn is_run_after(&self, target: impl Fn(i32) -> i32) -> bool {
        let moved = |cells: &[i32]| cells.iter().map(|&cell| target(cell)).collect();
        let (cells, nodes): (Vec<i32>, Vec<i32>) = (moved(&self.cells), moved(self.nodes));
        Block::of(cells, &nodes, self.ordered, self.shares).is_some_and(|moved| moved.is_run)
    }

    /// Returns the number of cells and nodes.
    pub fn len(&self) -> i32 {
        (self.cells.len() + self.nodes.len()) as i32
    }

    /// Finds the best start, from `least` to `most`, of a run of `cells` with the nodes after them. Returns the start
    /// at which most cells and nodes stay where they are, and the number of cells and nodes that stay. Of several
    /// such starts, returns the lowest.
    pub fn window(&self, cells: &[i32], least: i32, most: i32) -> Option<(i32, i32)> {
        if most < least {
            return None;
        }
        let len = cells.len() as i32;
        // For each start, the number of cells and nodes that would stay, among those whose order is fixed.
        let mut at: BTreeMap<i32, i32> = BTreeMap::new();
        let in_order = if self.ordered { cells } else { &[] };
        let nodes = self.nodes.iter().zip(len..);
        for (&cell, offset) in in_order.iter().zip(0..).chain(nodes) {
            *at.entry(cell - offset).or_default() += 1;
        }
        let mut sorted = if self.ordered { Vec::new() } else { cells.to_vec() };
        sorted.sort_unstable();
        // The number of other cells that stay can only increase at one of these starts.
        let mut starts: Vec<i32> = sorted.iter().copied().chain(at.keys().copied()).collect();
        starts.retain(|start| (least..=most).contains(start));
        starts.extend([least, most]);
        starts.sort_unstable();
        let (mut first, mut end) = (0, 0);
        let mut best: Option<(i32, i32)> = None;
        for start in starts {
            while sorted.get(first).is_some_and(|&cell| cell < start) {
                first += 1;
            }
            while sorted.get(end).is_some_and(|&cell| cell < start + len) {
                end += 1;
            }
            let stays = (end - first) as i32 + at.get(&start).copied().unwrap_or(0);
            if best.is_none_or(|(_, most)| stays > most) {
                best = Some((start, stays));
            }
        }
        best
    }
}
