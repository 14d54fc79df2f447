//! What a step does in the recurrent layers: integers that a cache passes to a backend's kernels.

use std::ops::Range;

use crate::bookkeeping::Slots;

/// The distance between two anchors, in positions. Anchors lie at its multiples and nowhere else, so results
/// do not depend on how a text was cut into steps.
pub const BLOCK: i32 = 64;

/// A step of the recurrent layers. All of them share it, as the layers of a group share a
/// [`LayerGroupPlan`](crate::bookkeeping::LayerGroupPlan).
///
/// A row is what one token leaves behind: a convolution's input column, or a recurrence's key, update and
/// decay. An anchor is a recurrence's state after a multiple of [`BLOCK`] positions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RecurrentPlan {
    /// The tokens of the step, as chains in the order of the tokens.
    pub chains: Vec<Chain>,
    /// The anchors that the step makes, in the order in which the chains reach them. An anchor with a slot is
    /// stored there; the others serve this step only.
    pub folds: Vec<Option<i32>>,
    /// The tokens whose rows are stored, ascending.
    pub stored: Vec<usize>,
    /// The slots for these rows.
    pub rows: Slots,
    /// The slots for the anchors that are stored, in the order of `folds`.
    pub anchors: Slots,
}

/// Tokens of a step that follow each other: each is the predecessor of the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// The tokens, by their index in the step.
    pub tokens: Range<usize>,
    /// The position of the first token.
    pub position: i32,
    /// The rows before the first token, in the order of positions; the last belongs to `position - 1`. They
    /// are all those from `base` on, and as many before it as a convolution reads and the sequence has.
    pub rows: Vec<RowSource>,
    /// The state that the chain starts from: that after `base` positions.
    pub anchor: AnchorSource,
    /// The position of `anchor`, a multiple of [`BLOCK`], at most `position` and at least `position - BLOCK`.
    pub base: i32,
    /// The chain's entries in [`RecurrentPlan::folds`]: one for each multiple of [`BLOCK`] above `base` up to
    /// and including the position of the last token, ascending. The token at such a position, and those after
    /// it, start from the new anchor.
    pub folds: Range<usize>,
}

/// Where a row lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowSource {
    /// In this slot.
    Slot(i32),
    /// The step computes it, for the token of this index.
    Token(usize),
}

/// Where a state lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnchorSource {
    /// Before position 0, all elements are zero.
    Zero,
    /// In this slot.
    Slot(i32),
    /// The step computes it, as this entry of [`RecurrentPlan::folds`].
    Fold(usize),
}

impl RecurrentPlan {
    /// Returns the number of tokens of the step.
    pub fn n_tokens(&self) -> usize {
        self.chains.last().map_or(0, |chain| chain.tokens.end)
    }
}

impl Default for Slots {
    fn default() -> Self {
        Self::Run(0..0)
    }
}
