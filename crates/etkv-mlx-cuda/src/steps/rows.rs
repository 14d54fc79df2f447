//! Computes the slots of a captured step's rows, and the keys that its tokens see.

use std::iter::once;
use std::ops::Range;

use etkv_core::bookkeeping::{MaskPlan, Slots};
use etkv_core::{LayerConfig, LayerGroups, LayerPolicy, Placement};
use etkv_cuda::{KeyMask, MAX_FEW, MAX_GROUPS, MAX_TOKENS};
use smallvec::SmallVec;

use etkv::Result;
use etkv::Step;

/// The layer groups of a cache, at most [`MAX_GROUPS`].
#[derive(Debug, PartialEq, Eq)]
pub struct Groups(LayerGroups);

impl Groups {
    /// Returns the groups, or `None` if there are more than a step supports.
    pub fn of(layers: &[LayerConfig]) -> Option<Self> {
        let groups = LayerGroups::of(layers);
        (1..=MAX_GROUPS).contains(&groups.policies.len()).then_some(Self(groups))
    }

    /// Returns the group of each layer.
    pub fn of_layer(&self) -> &[usize] {
        &self.0.of_layer
    }

    /// Returns whether steps always have a mask for a group. Groups with a window always have one, even
    /// before the window slides. Otherwise their steps would need a second graph once the window slides.
    fn is_masked(&self, group: usize) -> bool {
        self.0.policies[group] != LayerPolicy::Full
    }

    /// Returns for each group whether steps may have a mask. `is_shared` is whether sequences share the
    /// cache.
    pub fn may_be_masked(&self, is_shared: bool) -> GroupMasks {
        let of = |group| is_shared || self.is_masked(group);
        (0..self.0.policies.len()).map(of).collect()
    }

    /// Assigns slots to the rows of all layers. Returns the rows of each group, or `None` if the cache must
    /// see the rows' values.
    pub fn place(&self, step: &mut Step) -> Result<Option<SmallVec<[Rows; MAX_GROUPS]>>> {
        let mut placed: SmallVec<[Option<Placement>; MAX_GROUPS]> =
            self.0.policies.iter().map(|_| None).collect();
        for (layer, &group) in self.0.of_layer.iter().enumerate() {
            let Some(placement) = step.place(layer)? else {
                return Ok(None);
            };
            if placed[group].get_or_insert_with(|| placement.clone()) != &placement {
                return Ok(None);
            }
        }
        let rows = |(group, placement): (usize, Option<Placement>)| {
            Some(Rows::of(&placement?, self.is_masked(group)))
        };
        Ok(placed.into_iter().enumerate().map(rows).collect())
    }
}

/// For each layer group, whether a step has a mask for it.
pub type GroupMasks = SmallVec<[bool; MAX_GROUPS]>;

/// The rows of a step in the layers of a group.
#[derive(Debug, PartialEq)]
pub struct Rows {
    /// The slot of each token.
    pub slots: SmallVec<[i32; MAX_TOKENS]>,
    /// Attention may read the slots `0..n_keys`.
    pub n_keys: usize,
    /// The keys that each token sees, with room for the number of [planned tokens](planned_tokens). Without a
    /// mask, each token sees itself and all keys before it.
    pub mask: Option<KeyMask>,
}

/// Returns the number of tokens of the plan that runs a step of `n` tokens. Numbers above [`MAX_FEW`] are
/// rounded up, because padding costs less than a capture for each number.
pub fn planned_tokens(n: usize) -> usize {
    if n > MAX_FEW {
        n.next_multiple_of(32)
    } else {
        n
    }
}

impl Rows {
    fn of(Placement { write, read, mask }: &Placement, is_masked: bool) -> Self {
        // Without a mask, the kernels read all slots from 0, and assume that the last slots are those of the
        // step.
        let is_at_end =
            read.start == 0 && *write == Slots::Run(read.end - write.len() as i32..read.end);
        // A plan without a mask has no padding: it has as many tokens as the step.
        let causal = !is_masked
            && is_at_end
            && write.len() <= MAX_FEW
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
