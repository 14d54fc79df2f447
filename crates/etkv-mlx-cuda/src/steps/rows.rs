//! The slots of a captured step's rows, and the keys that its tokens see.

use std::iter::once;
use std::ops::Range;

use etkv_core::bookkeeping::{MaskPlan, Slots};
use etkv_core::{LayerConfig, LayerGroups, LayerPolicy, Placement};
use etkv_cuda::{KeyMask, MAX_FEW, MAX_GROUPS, MAX_TOKENS};
use smallvec::SmallVec;

use etkv::Result;
use etkv::Step;

/// The layer groups of a cache, within the limit of a step.
#[derive(Debug, PartialEq, Eq)]
pub struct Groups(LayerGroups);

impl Groups {
    /// Returns the groups, if a step can have that many.
    pub fn of(layers: &[LayerConfig]) -> Option<Self> {
        let groups = LayerGroups::of(layers);
        (1..=MAX_GROUPS).contains(&groups.policies.len()).then_some(Self(groups))
    }

    /// Returns the group of each layer.
    pub fn of_layer(&self) -> &[usize] {
        &self.0.of_layer
    }

    /// Returns whether steps always have a mask for a group. A window slides at some point, and a step with a
    /// mask needs another graph.
    fn is_masked(&self, group: usize) -> bool {
        self.0.policies[group] != LayerPolicy::Full
    }

    /// Returns the groups for which steps may have masks, if sequences may share the cache.
    pub fn may_be_masked(&self, is_shared: bool) -> GroupMasks {
        let of = |group| is_shared || self.is_masked(group);
        (0..self.0.policies.len()).map(of).collect()
    }

    /// Places the rows of all layers. Returns the rows of each group, or `None` if the cache must see the
    /// rows.
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
    /// The number of first slots that attention may read.
    pub n_keys: usize,
    /// The keys that each token sees, with room for the number of [planned tokens](planned_tokens). Without a
    /// mask, each token sees itself and all before it.
    pub mask: Option<KeyMask>,
}

/// Returns the tokens of the plan that runs a step of `n`. Steps of many tokens share a few plans: padding
/// costs little, and each other number would need another capture.
pub fn planned_tokens(n: usize) -> usize {
    if n > MAX_FEW {
        n.next_multiple_of(32)
    } else {
        n
    }
}

impl Rows {
    fn of(Placement { write, read, mask }: &Placement, is_masked: bool) -> Self {
        // The kernels read all slots from the first on, and assume that the last ones are the step's.
        let is_at_end =
            read.start == 0 && *write == Slots::Run(read.end - write.len() as i32..read.end);
        // A plan without a mask has exactly the step's tokens.
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
