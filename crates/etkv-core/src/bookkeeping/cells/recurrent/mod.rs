//! The bookkeeping of the rows and anchors of recurrent layers.
//!
//! A sequence keeps its last anchors, and the rows since the oldest of them. Its state after any later position
//! follows from these anchors and rows. So appending, rewinding, forking and aborting only add, drop or share rows.

mod builder;
mod state;
mod step;

use super::group::LayerGroup;
use super::tree::Tree;
use crate::bookkeeping::recurrent::BLOCK;
use step::OpenStep;

/// The positions that the recurrent layers of a model need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecurrentWindow {
    /// The number of positions before a token that the widest convolution reads, less than [`BLOCK`].
    pub lead: i32,
    /// The number of anchors that a sequence keeps, at least 1.
    pub anchors: i32,
}

impl RecurrentWindow {
    /// Returns the position of the oldest anchor that a sequence of `next` positions keeps. Position 0 stands for the
    /// state before any token.
    pub fn oldest_anchor(&self, next: i32) -> i32 {
        ((next - 1).max(0) / BLOCK - (self.anchors - 1)).max(0) * BLOCK
    }

    /// Returns the first position whose row a sequence of `next` positions keeps.
    pub fn first_row(&self, next: i32) -> i32 {
        (self.oldest_anchor(next) - self.lead).max(0)
    }

    /// Returns the maximum number of rows that a step of one sequence needs: the rows of the step, and the rows
    /// before the step that an abort needs.
    pub fn rows(&self, capacity: i32) -> i32 {
        (i64::from(self.anchors) * i64::from(BLOCK) + i64::from(self.lead))
            .saturating_mul(2)
            .min(i64::from(capacity)) as i32
    }

    /// Returns the maximum number of row slots that a sequence of `next` positions has needed so far.
    pub fn row_slots(&self, next: i32, capacity: i32) -> i32 {
        next.min(self.rows(capacity))
    }

    /// Returns the maximum number of anchor slots that a sequence of `next` positions has needed so far.
    pub fn anchor_slots(&self, next: i32) -> i32 {
        ((next - 1).max(0) / BLOCK).min(self.anchors.saturating_mul(2))
    }

    /// Returns the number of rows that a sequence of `next` positions keeps.
    pub fn held_rows(&self, next: i32) -> i32 {
        next - self.first_row(next)
    }

    /// Returns the number of anchors that a sequence of `next` positions keeps.
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
    /// The anchors. Their positions are counted in blocks.
    pub anchors: LayerGroup,
    step: Option<OpenStep>,
}

impl Recurrent {
    /// Returns empty bookkeeping for a cache of `capacity` cells.
    pub fn new(window: RecurrentWindow, capacity: i32) -> Self {
        Self {
            window,
            capacity,
            rows: LayerGroup::growing(window.rows(capacity), capacity),
            // Each anchor follows a token, and each token takes a cell, so the capacity suffices.
            anchors: LayerGroup::growing(1, capacity),
            step: None,
        }
    }

    /// Returns the least position, other than 0, to which a sequence can be rewound. This is its oldest anchor. The
    /// sequence can also be rewound to every later position.
    pub fn exact_from(&self, sequence: i32) -> i32 {
        if self.rows.held(sequence).first() == Some(0) {
            return 0;
        }
        self.anchors.held(sequence).first().map_or(0, |block| block * BLOCK)
    }

    /// Makes `target`, which has no rows, share the state of `source` after `next` positions. `source` must be
    /// rewindable to this position.
    pub fn fork(&mut self, source: i32, target: i32, next: i32) {
        self.rows.share(source, target, 0..next);
        self.anchors.share(source, target, 0..next / BLOCK + 1);
    }

    /// Removes the rows and anchors after the first `next` positions.
    pub fn rewind(&mut self, sequence: i32, next: i32) {
        self.rows.remove(sequence, &(next..i32::MAX));
        let first = if next > 0 { next / BLOCK + 1 } else { 0 };
        self.anchors.remove(sequence, &(first..i32::MAX));
    }

    /// Replaces the state of `sequence` by that of `checkpoint`.
    pub fn restore(&mut self, checkpoint: i32, sequence: i32) {
        self.rewind(sequence, 0);
        self.rows.share(checkpoint, sequence, 0..i32::MAX);
        self.anchors.share(checkpoint, sequence, 0..i32::MAX);
    }

    /// Makes `checkpoint` share the state of a sequence after `position` positions. This state must be an anchor.
    pub fn pin(&mut self, sequence: i32, checkpoint: i32, position: i32) {
        self.rows.share(sequence, checkpoint, (position - self.window.lead).max(0)..position);
        self.anchors.share(sequence, checkpoint, position / BLOCK..position / BLOCK + 1);
    }

    /// Returns whether a sequence has the state after this position, a multiple of [`BLOCK`].
    pub fn has_anchor(&self, sequence: i32, position: i32) -> bool {
        position == 0 || self.anchors.cell_of(sequence, position / BLOCK).is_some()
    }

    /// Drops the rows and anchors that a sequence of `next` positions no longer needs.
    pub fn trim(&mut self, sequence: i32, next: i32) {
        self.rows.remove(sequence, &(0..self.window.first_row(next)));
        self.anchors.remove(sequence, &(0..self.window.oldest_anchor(next) / BLOCK));
    }

    /// Moves the rows and anchors of the `accepted` nodes of a tree to the tree's sequence, whose next position is
    /// `next`. Frees the rows and anchors of the other nodes.
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
