//! The effect of a step on the recurrent layers: integers that a cache passes to a backend's kernels.

use std::ops::Range;

use crate::bookkeeping::Slots;

/// The distance between two anchors, in positions. All anchors are at multiples of this distance, so results do not
/// depend on how a text is split into steps.
pub const BLOCK: i32 = 64;

/// A step of the recurrent layers. All recurrent layers share it, as the layers of a group share a
/// [`LayerGroupPlan`](crate::bookkeeping::LayerGroupPlan).
///
/// A row is the data that a layer keeps of one token: the input column of a convolution, or the key, update and decay
/// of a recurrence. An anchor is the state of a recurrence after a multiple of [`BLOCK`] positions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RecurrentPlan {
    /// The tokens of the step, as chains in the order of the tokens.
    pub chains: Vec<Chain>,
    /// The anchors that the step computes, in the order in which the chains reach them. An anchor with a slot is
    /// stored in that slot. The other anchors are used only in this step.
    pub folds: Vec<Option<i32>>,
    /// The tokens whose rows are stored, ascending.
    pub stored: Vec<usize>,
    /// The slots for these rows.
    pub rows: Slots,
    /// The slots for the anchors that are stored, in the order of `folds`.
    pub anchors: Slots,
}

/// Consecutive tokens of a step: each is the predecessor of the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// The tokens, by their index in the step.
    pub tokens: Range<usize>,
    /// The position of the first token.
    pub position: i32,
    /// The rows before the first token, in the order of positions. The last one is at `position - 1`. They begin at
    /// `base`. If a convolution reads earlier rows that the sequence has, they begin at the first of these.
    pub rows: Vec<RowSource>,
    /// The state from which the chain starts, after `base` positions.
    pub anchor: AnchorSource,
    /// The position of `anchor`, a multiple of [`BLOCK`], at most `position` and at least `position - BLOCK`.
    pub base: i32,
    /// The range of the chain's entries in [`RecurrentPlan::folds`]. There is one entry for each multiple of
    /// [`BLOCK`] that is greater than `base` and at most the position of the last token, ascending. The token at such
    /// a position and the tokens after it start from the new anchor.
    pub folds: Range<usize>,
}

/// The source of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowSource {
    /// The row in this slot.
    Slot(i32),
    /// The row that the step computes for the token with this index.
    Token(usize),
}

/// The source of a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnchorSource {
    /// The state before position 0, whose elements are zero.
    Zero,
    /// The state in this slot.
    Slot(i32),
    /// The state that the step computes as this entry of [`RecurrentPlan::folds`].
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
