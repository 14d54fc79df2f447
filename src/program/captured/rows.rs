//! Where the rows of a captured step go, and the keys that its tokens see.

use std::iter::once;
use std::ops::Range;

use etkv_core::bookkeeping::{MaskPlan, Slots};
use etkv_core::Placement;
use etkv_cuda::{KeyMask, MOST_FEW, MOST_TOKENS};
use smallvec::SmallVec;

use crate::backend::Step;
use crate::error::Result;

/// The rows of a step, the same in each layer.
#[derive(Debug, PartialEq)]
pub struct Rows {
    /// Of each token its slot.
    pub slots: SmallVec<[i32; MOST_TOKENS]>,
    /// The slots that attention may read: those below.
    pub n_keys: usize,
    /// The keys that each token sees, with room for as many tokens as are [planned](planned_tokens). Without
    /// one, each token sees all before it and itself.
    pub mask: Option<KeyMask>,
}

/// Returns the tokens of the plan that runs a step of `n`. Steps of many share a few plans: what fills
/// them up costs little, and each other number would be captured anew.
pub fn planned_tokens(n: usize) -> usize {
    if n > MOST_FEW {
        n.next_multiple_of(32)
    } else {
        n
    }
}

impl Rows {
    /// Places the rows of all layers. Returns nothing if the layers differ, or the cache has to see the
    /// rows.
    pub fn place(step: &mut Step, n_layers: usize) -> Result<Option<Self>> {
        let Some(first) = step.place(0)? else {
            return Ok(None);
        };
        for layer in 1..n_layers {
            if step.place(layer)?.is_none_or(|placement| placement != first) {
                return Ok(None);
            }
        }
        Ok(Some(Self::of(&first)))
    }

    fn of(Placement { write, read, mask }: &Placement) -> Self {
        // The kernels take all slots from the first on, and the last ones for those of the step.
        let is_behind =
            read.start == 0 && *write == Slots::Run(read.end - write.len() as i32..read.end);
        // A plan without a mask has exactly the step's tokens.
        let causal = is_behind
            && write.len() <= MOST_FEW
            && match mask {
                MaskPlan::Causal => true,
                MaskPlan::None => write.len() == 1,
                MaskPlan::Explicit(_) => false,
            };
        let mask =
            (!causal).then(|| key_mask(write.len(), read.start as usize..read.end as usize, mask));
        Self { slots: write.iter().collect(), n_keys: read.end as usize, mask }
    }
}

fn key_mask(n: usize, read: Range<usize>, mask: &MaskPlan) -> KeyMask {
    let planned = planned_tokens(n);
    match mask {
        MaskPlan::None => KeyMask::padded(planned, (0..n).map(|_| once(read.clone()))),
        MaskPlan::Causal => {
            KeyMask::padded(planned, (0..n).map(|t| once(read.start..read.end - n + t + 1)))
        }
        MaskPlan::Explicit(runs) => KeyMask::padded(
            planned,
            (0..n).map(|query| {
                let start = read.start;
                runs.runs(query)
                    .iter()
                    .map(move |run| run.start as usize + start..run.end as usize + start)
            }),
        ),
    }
}
