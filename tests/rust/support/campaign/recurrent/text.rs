//! The expected state of a sequence of tokens.

use std::collections::BTreeSet;

use etkv_core::bookkeeping::BLOCK;

use crate::recurrence::Token;

/// A tree of candidates: the parent and the token of each node.
#[derive(Debug, Clone, Default)]
pub(super) struct Tree {
    pub(super) parents: Vec<i32>,
    pub(super) tokens: Vec<Token>,
    pub(super) n_written: usize,
}

impl Tree {
    pub(super) fn path(&self, node: usize) -> Vec<usize> {
        let up =
            std::iter::successors(Some(node), |&node| usize::try_from(self.parents[node]).ok());
        let mut path: Vec<usize> = up.collect();
        path.reverse();
        path
    }
}

/// The expected state of a sequence.
#[derive(Debug, Clone, Default)]
pub(super) struct Text {
    pub(super) tokens: Vec<Token>,
    pub(super) tree: Tree,
    /// The number of the load from which the sequence's first tokens came, or 0 if they came from steps. Equal texts
    /// of two loads are in different cells.
    pub(super) origin: u64,
    /// The least position from which every rewind must succeed.
    pub(super) low: i32,
    /// The positions of all checkpoints that were created. The cache may have dropped some to make room for others.
    pub(super) checkpoints: BTreeSet<i32>,
    pub(super) marks: BTreeSet<i32>,
}

impl Text {
    pub(super) fn next(&self) -> i32 {
        self.tokens.len() as i32
    }

    /// Records that the tokens at or after `start` were committed.
    pub(super) fn committed(&mut self, start: i32, anchors: i32) {
        let next = self.next();
        let oldest = ((next - 1).max(0) / BLOCK - (anchors - 1)).max(0) * BLOCK;
        self.low = self.low.max(oldest);
        let due: Vec<i32> =
            self.marks.iter().copied().filter(|mark| (start..next).contains(mark)).collect();
        for mark in due {
            self.marks.remove(&mark);
            self.checkpoints.insert(mark);
        }
    }

    pub(super) fn cut(&mut self, length: i32) {
        self.tokens.truncate(length as usize);
        self.checkpoints.retain(|&position| position <= length);
        self.low = self.low.min(length);
        if length == 0 {
            *self = Self::default();
        }
    }

    pub(super) fn reaches(&self, position: i32) -> bool {
        (self.low..=self.next()).contains(&position)
            || position == 0
            || self.checkpoints.contains(&position)
    }
}
