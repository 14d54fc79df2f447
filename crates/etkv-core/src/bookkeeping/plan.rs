//! What a step does to the slots of one layer group: integers that a cache passes to its pools.
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
    /// Returns the slots in their simplest form.
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

    /// Returns whether there are no slots.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns one past the last slot, or 0 without slots.
    pub fn end(&self) -> i32 {
        match self {
            Self::Run(run) => run.end,
            Self::List(list) => list.iter().max().map_or(0, |slot| slot + 1),
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

/// The slots that a query sees, of those that are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MaskPlan {
    /// Every slot.
    None,
    /// Query `i` of `T` sees all but the last `T - 1 - i`.
    Causal,
    /// The slots with a 1: `T` rows of one byte for each slot that is read.
    Explicit(Vec<u8>),
}

/// The most elements of a mask. Arrays count elements in 32 bits.
const MAX_MASK: usize = i32::MAX as usize;

/// Returns the mask of `n_tokens` queries over `width` slots, none of which is seen yet.
///
/// # Errors
/// Those of [`mask_len`], and [`Backend`](crate::Status::Backend) if there is no such memory.
pub fn blank_mask(n_tokens: usize, width: usize) -> Result<Vec<u8>> {
    let len = mask_len(n_tokens, width)?;
    let mut mask = Vec::new();
    if mask.try_reserve_exact(len).is_err() {
        fail!(
            Backend,
            "out of memory: {len} bytes for the mask of {n_tokens} tokens over {width} slots; free \
             memory or take fewer tokens at a time"
        );
    }
    mask.resize(len, 0);
    Ok(mask)
}

/// Returns the bytes of the mask of `n_tokens` queries over `width` slots.
///
/// # Errors
/// [`Capacity`](crate::Status::Capacity) if an array cannot have so many elements.
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
    /// The slots for the rows of the step's tokens, in their order.
    pub write: Slots,
    /// The slots that attention reads.
    pub read: Range<i32>,
    /// The part of `read` that each query sees.
    pub mask: MaskPlan,
}

impl LayerGroupPlan {
    /// Returns the number of slots that have to be allocated.
    pub fn needed(&self) -> i32 {
        self.read.end.max(self.write.end())
    }
}

/// Rows of one layer group that move to other slots. The two lists may overlap. Each names a slot
/// once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    /// The layer group.
    pub group: usize,
    /// The present slots.
    pub from: Slots,
    /// The new slots, in the same order.
    pub to: Slots,
}
