//! The effect of a step on the slots of one layer group: integers that a cache passes to its store.
//!
//! A *layer group* consists of the layers that share a policy. These layers keep the same positions in the same
//! slots, so they share one plan and one mask.

use std::ops::Range;
use std::sync::Arc;

use super::MaskRuns;

/// Slots, as the target or source of writes, reads and moves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Slots {
    /// One run of slots.
    Run(Range<i32>),
    /// These slots, in this order.
    List(Vec<i32>),
}

impl Slots {
    /// Returns the slots as a run if possible.
    pub fn of(slots: &[i32]) -> Self {
        let start = slots.first().copied().unwrap_or(0);
        let is_run = slots.iter().zip(start..).all(|(&slot, expected)| slot == expected);
        if is_run {
            Self::Run(start..start + slots.len() as i32)
        } else {
            Self::List(slots.to_vec())
        }
    }

    /// Returns the number of slots.
    pub fn len(&self) -> usize {
        match self {
            Self::Run(run) => run.len(),
            Self::List(list) => list.len(),
        }
    }

    /// Returns whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the last slot plus 1, or 0 if there are no slots.
    pub fn end(&self) -> i32 {
        match self {
            Self::Run(run) => run.end,
            Self::List(list) => list.iter().max().map_or(0, |slot| slot + 1),
        }
    }

    /// Returns the slot with the lowest number.
    pub fn least(&self) -> Option<i32> {
        match self {
            Self::Run(run) => (!run.is_empty()).then_some(run.start),
            Self::List(list) => list.iter().min().copied(),
        }
    }

    /// Returns an iterator over the slots.
    pub fn iter(&self) -> Box<dyn Iterator<Item = i32> + '_> {
        match self {
            Self::Run(run) => Box::new(run.clone()),
            Self::List(list) => Box::new(list.iter().copied()),
        }
    }
}

/// The slots that a query sees, among those that the step reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MaskPlan {
    /// Every slot.
    None,
    /// Query `i` of `T` sees all slots except the last `T - 1 - i`.
    Causal,
    /// A set of slots for each query.
    Explicit(Arc<MaskRuns>),
}

/// The effect of a step on the slots of one layer group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerGroupPlan {
    /// The slots for the rows of the step's tokens, in the order of the tokens.
    pub write: Slots,
    /// The slots that attention reads.
    pub read: Range<i32>,
    /// The part of `read` that each query sees.
    pub mask: MaskPlan,
}

impl LayerGroupPlan {
    /// Returns the number of slots that must be allocated.
    pub fn needed(&self) -> i32 {
        self.read.end.max(self.write.end())
    }
}

/// Rows of one layer group that move to other slots. The two lists may overlap. Each slot occurs once in each list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    /// The number of the layer group.
    pub group: usize,
    /// The current slots.
    pub from: Slots,
    /// The new slots, in the same order.
    pub to: Slots,
}
