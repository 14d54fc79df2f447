//! Trees of candidate tokens after a sequence.

use std::collections::BTreeMap;

use super::{check_sequence, CellsBookkeeping};
use crate::bookkeeping::{Move, Slots};
use crate::error::{fail, Result};
use crate::snapshot::{damaged, TreeState};

/// A tree of candidates after one sequence. Nodes are numbered in the order of their proposal, parents before
/// children.
#[derive(Debug, Clone, Default)]
pub struct Tree {
    parents: Vec<i32>,
    depths: Vec<i32>,
    /// The number of nodes with written rows: all nodes, or all before the last frontier.
    n_written: usize,
    /// The cells of the written nodes, for each layer group.
    pub cells: Vec<Vec<i32>>,
    /// The cells of the rows of written nodes in recurrent layers.
    pub rows: Vec<i32>,
    /// The nodes that have an anchor after them in recurrent layers, each with the anchor's slot.
    pub anchors: BTreeMap<usize, i32>,
}

/// The parent of a node that directly follows the sequence.
pub const ROOT: i32 = -1;

impl Tree {
    pub fn new(n_groups: usize) -> Self {
        Self { cells: vec![Vec::new(); n_groups], ..Self::default() }
    }

    /// Returns the state of the tree after `sequence`, for a file.
    pub fn state(&self, sequence: i32) -> TreeState {
        let Self { parents, n_written, cells, rows, anchors, .. } = self.clone();
        let anchors = anchors.into_iter().collect();
        TreeState { sequence, parents, n_written, cells, rows, anchors }
    }

    /// Returns the tree of a file's state. Does not check its cells.
    ///
    /// # Errors
    /// [`File`](crate::Status::File) if the state is not a tree.
    pub fn of_state(state: &TreeState, n_groups: usize) -> Result<Self> {
        let mut tree = Self::new(n_groups);
        tree.propose(&state.parents).map_err(damaged)?;
        let TreeState { n_written, cells, rows, anchors, .. } = state;
        let whole = cells.len() == n_groups && cells.iter().all(|cells| cells.len() == *n_written);
        let whole = whole && [0, *n_written].contains(&rows.len());
        if *n_written > tree.len() || !whole {
            let n = tree.len();
            return Err(damaged(format_args!(
                "a tree of {n} nodes has cells for {n_written} nodes"
            )));
        }
        if anchors.iter().any(|&(node, _)| node >= *n_written) {
            return Err(damaged("an anchor follows a node that has not run"));
        }
        let (cells, rows) = (cells.clone(), rows.clone());
        let anchors = anchors.iter().copied().collect();
        Ok(Self { n_written: *n_written, cells, rows, anchors, ..tree })
    }

    /// Returns the number of nodes, written or not.
    pub fn len(&self) -> usize {
        self.parents.len()
    }

    pub fn n_written(&self) -> usize {
        self.n_written
    }

    /// Returns the number of nodes that the next step writes.
    pub fn n_pending(&self) -> usize {
        self.len() - self.n_written
    }

    /// Returns the distance of a node from the end of the sequence: 0 for a node that directly follows it.
    pub fn depth(&self, node: usize) -> i32 {
        self.depths[node]
    }

    /// Appends a frontier of nodes with these parents.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if there are no nodes, or a parent is neither an earlier
    /// node nor [`ROOT`]; [`Step`](crate::Status::Step) if the last frontier has not been written.
    pub fn propose(&mut self, parents: &[i32]) -> Result<()> {
        if parents.is_empty() {
            fail!(InvalidArgument, "expected a frontier of at least 1 node, got none");
        }
        if self.n_pending() > 0 {
            fail!(
                Step,
                "the last frontier, of {} nodes, has not run; run a step first",
                self.n_pending()
            );
        }
        for (offset, &parent) in parents.iter().enumerate() {
            let node = self.len() + offset;
            if parent < ROOT || usize::try_from(parent).is_ok_and(|parent| parent >= node) {
                fail!(
                    InvalidArgument,
                    "expected a parent of node {node} from {ROOT} to {}, got {parent}",
                    node as i64 - 1
                );
            }
        }
        for &parent in parents {
            let depth = usize::try_from(parent).map_or(0, |parent| self.depths[parent] + 1);
            self.parents.push(parent);
            self.depths.push(depth);
        }
        Ok(())
    }

    /// Marks the pending nodes as written. Their cells must be set.
    pub fn written(&mut self) {
        self.n_written = self.len();
    }

    /// Returns the parent of a node, or `None` if it is a child of the sequence.
    pub fn parent(&self, node: usize) -> Option<usize> {
        usize::try_from(self.parents[node]).ok()
    }

    /// Returns a node, its parent, and so on up to the sequence.
    pub fn chain_up(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(Some(node), |&node| usize::try_from(self.parents[node]).ok())
    }

    /// Returns whether every node is the child of the previous one.
    pub fn is_chain(&self) -> bool {
        self.parents.iter().zip(ROOT..).all(|(&parent, before)| parent == before)
    }

    /// Checks that the nodes are a chain from the sequence: the first node is a child of the sequence, and each
    /// further node is a child of the node before it. Also checks that all of them have been written.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument).
    pub fn check_chain(&self, accepted: &[i32]) -> Result<()> {
        let mut before = ROOT;
        for &node in accepted {
            let known = usize::try_from(node).ok().filter(|&node| node < self.n_written);
            let Some(index) = known else {
                fail!(
                    InvalidArgument,
                    "cannot accept node {node}: {} nodes of the tree have run",
                    self.n_written
                );
            };
            if self.parents[index] != before {
                fail!(
                    InvalidArgument,
                    "cannot accept node {node} after {before}: its parent is {}; accept a chain",
                    self.parents[index]
                );
            }
            before = node;
        }
        Ok(())
    }
}

impl CellsBookkeeping {
    /// Appends a frontier of candidates to the tree after a sequence. They are queries of the sequence's next step. A
    /// parent is the number of an earlier node, or -1 for the sequence itself.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument): there are no nodes, or a parent is not an earlier node.
    /// - [`Step`](crate::Status::Step): a step is open, or the last frontier has not run.
    /// - [`Capacity`](crate::Status::Capacity): the frontier does not fit.
    pub fn propose(&mut self, sequence: i32, parents: &[i32]) -> Result<()> {
        self.refuse_in_step("propose a tree")?;
        check_sequence(sequence)?;
        let waiting: usize = self.trees.values().map(Tree::n_pending).sum();
        let room = (self.capacity - self.length()) as usize;
        if waiting + parents.len() > room {
            fail!(
                Capacity,
                "a frontier of {} nodes does not fit: {room} of {} cells are free, {waiting} of \
                 them for other frontiers",
                parents.len(),
                self.capacity
            );
        }
        let n_groups = self.groups.len();
        match self.trees.get_mut(&sequence) {
            Some(tree) => tree.propose(parents)?,
            None => {
                let mut tree = Tree::new(n_groups);
                tree.propose(parents)?;
                self.trees.insert(sequence, tree);
            }
        }
        Ok(())
    }

    /// Returns the number of nodes of the tree after a sequence, or 0 if it has none.
    ///
    /// # Errors
    /// As [`seq_len`](Self::seq_len).
    pub fn tree_len(&self, sequence: i32) -> Result<usize> {
        check_sequence(sequence)?;
        Ok(self.trees.get(&sequence).map_or(0, Tree::len))
    }

    /// Returns the number of cells of the candidates of all trees.
    pub fn candidates(&self) -> i32 {
        self.trees.values().map(|tree| tree.n_written() as i32).sum()
    }

    /// Adds a chain of candidates to their sequence and removes the rest of the tree. Returns the moves of the
    /// chain's rows to the first of the tree's cells. A sequence that is one run stays one run.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument): there is no tree, or the nodes are not a chain that
    ///   begins with a child of the sequence.
    /// - [`Step`](crate::Status::Step): a step is open.
    pub fn commit_tree(&mut self, sequence: i32, accepted: &[i32]) -> Result<Vec<Move>> {
        self.refuse_in_step("commit a tree")?;
        check_sequence(sequence)?;
        match self.trees.get(&sequence) {
            None => {
                fail!(InvalidArgument, "sequence {sequence} carries no tree; propose one first")
            }
            Some(tree) => tree.check_chain(accepted)?,
        }
        let next = self.next(sequence);
        let Some(tree) = self.trees.remove(&sequence) else {
            return Ok(Vec::new());
        };
        let mut moves = Vec::new();
        for (index, (group, cells)) in self.groups.iter_mut().zip(&tree.cells).enumerate() {
            let mut sorted = cells.clone();
            sorted.sort_unstable();
            sorted.iter().for_each(|&cell| group.release(cell));
            let (mut from, mut to) = (Vec::new(), Vec::new());
            for ((&node, &target), position) in accepted.iter().zip(&sorted).zip(next..) {
                group.hold(target);
                group.append(sequence, position, target);
                let source = cells[node as usize];
                if source != target {
                    from.push(source);
                    to.push(target);
                }
            }
            if !from.is_empty() {
                moves.push(Move { group: index, from: Slots::of(&from), to: Slots::of(&to) });
            }
        }
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.commit_tree(sequence, &tree, accepted, next);
        }
        if self.checkpoints.has_marks() {
            self.pin_marks(&[(sequence, next..next + accepted.len() as i32)]);
        }
        moves.extend(self.slide(&[sequence]));
        Ok(moves)
    }

    pub(super) fn drop_tree(&mut self, sequence: i32) {
        let Some(tree) = self.trees.remove(&sequence) else {
            return;
        };
        for (group, cells) in self.groups.iter_mut().zip(&tree.cells) {
            cells.iter().for_each(|&cell| group.release(cell));
        }
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.drop_tree(&tree);
        }
    }

    pub(super) fn refuse_under_tree(&self, sequence: i32, what: &str) -> Result<()> {
        if let Some(tree) = self.trees.get(&sequence) {
            fail!(
                Step,
                "sequence {sequence} carries a tree of {} nodes: commit it before you {what}",
                tree.len()
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depths_and_ancestors_follow_parents() {
        let mut tree = Tree::new(1);
        tree.propose(&[-1, 0, 0, 1]).unwrap();
        assert_eq!((0..4).map(|node| tree.depth(node)).collect::<Vec<_>>(), [0, 1, 1, 2]);
        assert_eq!(tree.chain_up(3).collect::<Vec<_>>(), [3, 1, 0]);
        assert!(!tree.is_chain());
        assert!(tree.propose(&[3]).unwrap_err().message().contains("4 nodes"));
        tree.written();
        tree.propose(&[3, -1]).unwrap();
        assert_eq!((tree.depth(4), tree.depth(5), tree.n_pending()), (3, 0, 2));
    }

    #[test]
    fn parents_out_of_range_are_refused() {
        let mut tree = Tree::new(1);
        for parents in [&[][..], &[0], &[-2], &[-1, 1], &[-1, i32::MAX], &[i32::MIN]] {
            assert!(tree.propose(parents).is_err(), "{parents:?}");
            assert_eq!(tree.len(), 0);
        }
    }

    #[test]
    fn chains_start_at_the_sequence_and_go_down() {
        let mut tree = Tree::new(1);
        tree.propose(&[-1, 0, 0, 1]).unwrap();
        assert!(tree.check_chain(&[0]).is_err(), "nothing is written yet");
        tree.written();
        for good in [&[][..], &[0], &[0, 2], &[0, 1, 3]] {
            assert!(tree.check_chain(good).is_ok(), "{good:?}");
        }
        for bad in [&[1][..], &[0, 3], &[0, 0], &[4], &[-1], &[0, 1, 2]] {
            assert!(tree.check_chain(bad).is_err(), "{bad:?}");
        }
    }
}
