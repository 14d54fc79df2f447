//! Candidate tokens that grow behind a sequence, some of which it will accept.

use crate::error::{fail, Result};

/// A tree of candidates behind one sequence. Its nodes are numbered as they are
/// proposed; a parent comes before its children.
#[derive(Debug, Clone, Default)]
pub struct Tree {
    parents: Vec<i32>,
    depths: Vec<i32>,
    /// Nodes whose rows are there: all before the last frontier, or all.
    n_written: usize,
    /// The cells of the written nodes, for each lane.
    pub cells: Vec<Vec<i32>>,
}

/// The parent of a node that follows the sequence itself.
pub const ROOT: i32 = -1;

impl Tree {
    pub fn new(n_lanes: usize) -> Self {
        Self { cells: vec![Vec::new(); n_lanes], ..Self::default() }
    }

    /// Nodes, written or not.
    pub fn len(&self) -> usize {
        self.parents.len()
    }

    pub fn n_written(&self) -> usize {
        self.n_written
    }

    /// Nodes that the next step writes.
    pub fn n_pending(&self) -> usize {
        self.len() - self.n_written
    }

    /// How far behind the sequence's end a node lies: 0 where it follows.
    pub fn depth(&self, node: usize) -> i32 {
        self.depths[node]
    }

    /// Appends a frontier of nodes with these parents.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for none, or for a
    /// parent that is neither a node before nor [`ROOT`];
    /// [`Step`](crate::Status::Step) while the last frontier is not written.
    pub fn propose(&mut self, parents: &[i32]) -> Result<()> {
        if parents.is_empty() {
            fail!(InvalidArgument, "a frontier needs at least 1 node");
        }
        if self.n_pending() > 0 {
            fail!(Step, "a frontier of {} nodes is still to be run", self.n_pending());
        }
        for (offset, &parent) in parents.iter().enumerate() {
            let node = self.len() + offset;
            if parent < ROOT || usize::try_from(parent).is_ok_and(|parent| parent >= node) {
                fail!(
                    InvalidArgument,
                    "node {node} has parent {parent}: a parent is a node before it, or {ROOT}"
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

    /// The step is done that wrote the pending nodes; their cells are known.
    pub fn written(&mut self) {
        self.n_written = self.len();
    }

    /// A node, its parent, and so on up to the sequence.
    pub fn chain_up(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(Some(node), |&node| usize::try_from(self.parents[node]).ok())
    }

    /// Whether every node follows the one before.
    pub fn is_chain(&self) -> bool {
        self.parents.iter().zip(ROOT..).all(|(&parent, before)| parent == before)
    }

    /// Refuses nodes that do not lead from the sequence on, each the child of the
    /// one before, all of them written.
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
                    "node {node} is accepted, but the tree has {} written nodes",
                    self.n_written
                );
            };
            if self.parents[index] != before {
                fail!(
                    InvalidArgument,
                    "node {node} is accepted after {before}, but its parent is {}",
                    self.parents[index]
                );
            }
            before = node;
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
    fn parents_that_cannot_be_are_refused() {
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
