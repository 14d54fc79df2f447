//! What a step does to the slots of one layer group: integers that a cache hands to its
//! pools.
//!
//! A *layer group* is the layers of one policy. They keep the same positions in the same
//! slots, so they share one plan and one mask.

use std::ops::Range;

use crate::error::{fail, Result};

/// Slots that rows are written to, read from or moved to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Slots {
    /// One run of slots.
    Run(Range<i32>),
    /// These slots, in this order.
    List(Vec<i32>),
}

impl Slots {
    /// The slots as the simplest form that they have.
    pub fn of(slots: &[i32]) -> Self {
        let start = slots.first().copied().unwrap_or(0);
        let is_run = slots.iter().zip(start..).all(|(&slot, expected)| slot == expected);
        if is_run {
            Self::Run(start..start + slots.len() as i32)
        } else {
            Self::List(slots.to_vec())
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Self::Run(run) => run.len(),
            Self::List(list) => list.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One past the last of them; 0 where there are none.
    pub fn end(&self) -> i32 {
        match self {
            Self::Run(run) => run.end,
            Self::List(list) => list.iter().max().map_or(0, |slot| slot + 1),
        }
    }

    /// Each of them.
    pub fn iter(&self) -> Box<dyn Iterator<Item = i32> + '_> {
        match self {
            Self::Run(run) => Box::new(run.clone()),
            Self::List(list) => Box::new(list.iter().copied()),
        }
    }
}

/// Which of the slots that are read a query sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MaskPlan {
    /// All of them.
    None,
    /// Query `i` of `T` all but the last `T - 1 - i`.
    Causal,
    /// Those with a 1: `T` rows, one byte a slot that is read.
    Explicit(Vec<u8>),
}

/// The most elements of a mask: arrays count theirs in 32 bits.
const MAX_MASK: usize = i32::MAX as usize;

/// Bytes of the mask of `n_tokens` queries over `width` slots.
///
/// # Errors
/// [`Capacity`](crate::Status::Capacity) where an array cannot have so many.
pub fn mask_len(n_tokens: usize, width: usize) -> Result<usize> {
    match n_tokens.checked_mul(width) {
        Some(len) if len <= MAX_MASK => Ok(len),
        _ => fail!(
            Capacity,
            "a step of {n_tokens} tokens that reads {width} slots takes a mask of \
             {n_tokens} x {width} elements, the most are {MAX_MASK}: take fewer tokens at a time"
        ),
    }
}

/// What a step does to the slots of one layer group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerGroupPlan {
    /// Where the rows of the step's tokens go, in their order.
    pub write: Slots,
    /// What attention reads.
    pub read: Range<i32>,
    /// Which of it each query sees.
    pub mask: MaskPlan,
}

impl LayerGroupPlan {
    /// Slots that have to be allocated.
    pub fn needed(&self) -> i32 {
        self.read.end.max(self.write.end())
    }
}

/// Rows of one layer group that move from some slots to others; the two lists may
/// overlap, and name no slot twice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    /// The layer group.
    pub group: usize,
    /// Where they are.
    pub from: Slots,
    /// Where they go, in the same order.
    pub to: Slots,
}
