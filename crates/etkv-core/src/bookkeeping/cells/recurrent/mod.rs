//! The rows and anchors of recurrent layers.
//!
//! A sequence keeps its last anchors, and the rows from the oldest of them on. Its state after any later
//! position follows from these, so appending, rewinding, forking and aborting only add, drop or share rows.

mod builder;
mod state;
mod step;

use super::group::LayerGroup;
use super::tree::Tree;
use crate::bookkeeping::recurrent::BLOCK;
use step::OpenStep;

/// What the recurrent layers of a model need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecurrentWindow {
    /// The positions before a token that the widest convolution reads, less than [`BLOCK`].
    pub lead: i32,
    /// The anchors that a sequence keeps, at least 1.
    pub anchors: i32,
}

impl RecurrentWindow {
    /// Returns the position of the oldest anchor that a sequence of `next` positions keeps; 0 is the state
    /// before any token.
    pub fn oldest_anchor(&self, next: i32) -> i32 {
        ((next - 1).max(0) / BLOCK - (self.anchors - 1)).max(0) * BLOCK
    }

    /// Returns the first position whose row a sequence of `next` positions keeps.
    pub fn first_row(&self, next: i32) -> i32 {
        (self.oldest_anchor(next) - self.lead).max(0)
    }

    /// Returns the maximum number of rows that a step of one sequence needs: those of before, which an abort goes
    /// back to, and its own.
    pub fn rows(&self, capacity: i32) -> i32 {
        (i64::from(self.anchors) * i64::from(BLOCK) + i64::from(self.lead))
            .saturating_mul(2)
            .min(i64::from(capacity)) as i32
    }

    /// Returns the slots of rows that one sequence has needed once it has `next` positions.
    pub fn row_slots(&self, next: i32, capacity: i32) -> i32 {
        next.min(self.rows(capacity))
    }

    /// Returns the slots of anchors that one sequence has needed once it has `next` positions.
    pub fn anchor_slots(&self, next: i32) -> i32 {
        ((next - 1).max(0) / BLOCK).min(self.anchors.saturating_mul(2))
    }

    /// Returns the rows that a sequence of `next` positions keeps.
    pub fn held_rows(&self, next: i32) -> i32 {
        next - self.first_row(next)
    }

    /// Returns the anchors that a sequence of `next` positions keeps.
    pub fn held_anchors(&self, next: i32) -> i32 {
        ((next - 1).max(0) / BLOCK).min(self.anchors)
    }
}

/// The rows and anchors of all sequences and trees.
#[derive(Debug, Clone)]
pub struct Recurrent {
    pub window: RecurrentWindow,
    capacity: i32,
    pub rows: LayerGroup,
    /// The position of an anchor is counted in blocks.
    pub anchors: LayerGroup,
    step: Option<OpenStep>,
}

impl Recurrent {
    /// Returns the bookkeeping of a cache of `capacity` cells without rows.
    pub fn new(window: RecurrentWindow, capacity: i32) -> Self {
        Self {
            window,
            capacity,
            rows: LayerGroup::growing(window.rows(capacity), capacity),
            // An anchor follows a token, which takes a cell.
            anchors: LayerGroup::growing(1, capacity),
            step: None,
        }
    }

    /// Returns the least position, other than 0, from which on a sequence can be rewound to every position: that
    /// of its oldest anchor.
    pub fn exact_from(&self, sequence: i32) -> i32 {
        if self.rows.held(sequence).first() == Some(0) {
            return 0;
        }
        self.anchors.held(sequence).first().map_or(0, |block| block * BLOCK)
    }

    /// Makes a sequence without rows share the state of another after `next` positions, which it can be
    /// rewound to.
    pub fn fork(&mut self, source: i32, target: i32, next: i32) {
        self.rows.share(source, target, 0..next);
        self.anchors.share(source, target, 0..next / BLOCK + 1);
    }

    /// Removes the state after `next` positions.
    pub fn rewind(&mut self, sequence: i32, next: i32) {
        self.rows.remove(sequence, &(next..i32::MAX));
        let first = if next > 0 { next / BLOCK + 1 } else { 0 };
        self.anchors.remove(sequence, &(first..i32::MAX));
    }

    /// Makes the state of `sequence` the one that `checkpoint` keeps.
    pub fn restore(&mut self, checkpoint: i32, sequence: i32) {
        self.rewind(sequence, 0);
        self.rows.share(checkpoint, sequence, 0..i32::MAX);
        self.anchors.share(checkpoint, sequence, 0..i32::MAX);
    }

    /// Keeps the state of a sequence after `position` positions, an anchor, in the name of `checkpoint`.
    pub fn pin(&mut self, sequence: i32, checkpoint: i32, position: i32) {
        self.rows.share(sequence, checkpoint, (position - self.window.lead).max(0)..position);
        self.anchors.share(sequence, checkpoint, position / BLOCK..position / BLOCK + 1);
    }

    /// Returns whether a sequence holds the state after this position, a multiple of [`BLOCK`].
    pub fn has_anchor(&self, sequence: i32, position: i32) -> bool {
        position == 0 || self.anchors.cell_of(sequence, position / BLOCK).is_some()
    }

    /// Drops the rows and anchors that a sequence of `next` positions no longer needs.
    pub fn trim(&mut self, sequence: i32, next: i32) {
        self.rows.remove(sequence, &(0..self.window.first_row(next)));
        self.anchors.remove(sequence, &(0..self.window.oldest_anchor(next) / BLOCK));
    }

    /// Gives the rows and anchors of the `accepted` nodes of a tree to its sequence, whose next position is
    /// `next`, and frees the others.
    pub fn commit_tree(&mut self, sequence: i32, tree: &Tree, accepted: &[i32], next: i32) {
        self.drop_tree(tree);
        for (&node, position) in accepted.iter().zip(next..) {
            let node = node as usize;
            let Some(&cell) = tree.rows.get(node) else {
                continue;
            };
            self.rows.hold(cell);
            self.rows.append(sequence, position, cell);
            if let Some(&slot) = tree.anchors.get(&node) {
                self.anchors.hold(slot);
                self.anchors.append(sequence, (position + 1) / BLOCK, slot);
            }
        }
    }

    /// Frees the rows and anchors of a tree.
    pub fn drop_tree(&mut self, tree: &Tree) {
        tree.rows.iter().for_each(|&cell| self.rows.release(cell));
        tree.anchors.values().for_each(|&slot| self.anchors.release(slot));
    }

    /// Removes everything.
    pub fn clear(&mut self) {
        *self = Self::new(self.window, self.capacity);
    }
}
