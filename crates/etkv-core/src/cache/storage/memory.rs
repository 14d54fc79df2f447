//! The bytes of a cache's buffers, and their share of the process's memory budget.

use std::ops::Range;

use super::Storage;
use crate::bookkeeping::{LayerGroupPlan, Move};
use crate::config::LayerPolicy;
use crate::error::Result;
use crate::format::KvFormat;
use crate::memory::{Bytes, LayerMemory, Memory, RecurrentMemory};
use crate::store::{Extent, Store};
use crate::store_layer::SlotsOf;

impl<S: Store> Storage<S> {
    /// Reserves the memory that buffers need to grow to `slots` slots of each layer group. Replaced buffers count
    /// until [`settle`](Self::settle).
    pub(super) fn reserve(&mut self, slots: impl Fn(&Self, usize) -> i32) -> Result<()> {
        let bytes = self.sum(|group, extent, slot| {
            let slots = slots(self, group);
            if extent.slots < slots {
                bytes_of(slots - extent.shared, slot)
            } else {
                0
            }
        });
        self.reserve_bytes(bytes)
    }

    pub(super) fn reserve_bytes(&mut self, bytes: u64) -> Result<()> {
        self.unsettled |= bytes > 0;
        self.share.reserve_giving_way(bytes, S::give_way)
    }

    /// Returns the number of the cache among the holders of the memory budget.
    pub fn holder(&self) -> u64 {
        self.share.id()
    }

    /// Sets the kind of the cache in reports of the memory budget.
    pub fn describe(&self, kind: &str) {
        self.share.describe(kind, None);
    }

    /// Releases the bytes of replaced buffers in the memory budget.
    pub(super) fn settle(&mut self) {
        if std::mem::take(&mut self.unsettled) {
            self.share.settle(self.held());
        }
    }

    /// Returns the bytes of the buffers.
    pub(super) fn held(&self) -> u64 {
        self.sum(|_, extent, slot| bytes_of(extent.own(), slot))
    }

    /// Returns the sum of `bytes` over all buffers. `bytes` receives the layer group, the extent, and the bytes of a
    /// slot.
    pub(super) fn sum(&self, bytes: impl Fn(usize, Extent, u64) -> u64) -> u64 {
        let groups = self.layers.groups.iter().enumerate();
        groups.fold(0, |sum: u64, (layer, &group)| {
            let of_layer = self.buffers(layer).map(|(extent, slot)| bytes(group, extent, slot));
            of_layer.into_iter().fold(sum, u64::saturating_add)
        })
    }

    /// Returns the buffers of a layer's keys and values, and the bytes of a slot in each.
    pub(super) fn buffers(&self, layer: usize) -> [(Extent, u64); 2] {
        let [mut k, mut v] = self.store.extents(layer);
        if self.kind_of(layer) != SlotsOf::Attention(LayerPolicy::Full) {
            // The layer group of a window soon overwrites shared rows, so they count as rows of this cache from the
            // start.
            (k.shared, v.shared) = (0, 0);
        }
        let layer = &self.layers.layers[layer];
        [(k, layer.slot_bytes_in(0, k.format)), (v, layer.slot_bytes_in(1, v.format))]
    }

    pub(super) fn kind_of(&self, layer: usize) -> SlotsOf {
        self.layers.kinds[self.layers.groups[layer]]
    }

    /// Reserves the memory of new buffers with these formats and slots, in addition to the existing buffers.
    pub(super) fn reserve_others(&mut self, formats: [KvFormat; 2], slots: &[i32]) -> Result<()> {
        let bytes = slots.iter().enumerate().fold(0, |bytes: u64, (layer, &slots)| {
            let made = self.slot_bytes(layer, formats);
            let of = |((slot, format), (extent, _)): ((u64, KvFormat), (Extent, u64))| {
                if (extent.format, extent.slots) == (format, slots) {
                    0
                } else {
                    bytes_of(slots, slot)
                }
            };
            made.zip(self.buffers(layer)).map(of).fold(bytes, u64::saturating_add)
        });
        self.reserve_bytes(bytes)
    }

    /// Returns the bytes of a slot and the format, for each buffer of a layer in a cache of these formats.
    pub(super) fn slot_bytes(
        &self,
        layer: usize,
        formats: [KvFormat; 2],
    ) -> impl Iterator<Item = (u64, KvFormat)> {
        let layer = &self.layers.layers[layer];
        layer.slot_bytes(formats).into_iter().zip(layer.formats(formats))
    }

    /// Reserves the memory for a step with these plans of the layer groups.
    pub fn reserve_for(&mut self, plans: &[LayerGroupPlan]) -> Result<()> {
        let own = self.reserve_own(|group| plans.get(group).and_then(|plan| plan.write.least()));
        let reserved = own.and_then(|()| {
            self.reserve(|storage, group| {
                plans.get(group).map_or(0, |plan| storage.allocated(group, plan.needed()))
            })
        });
        reserved.inspect_err(|_| self.settle())
    }

    /// Reserves the memory that [`apply`](Self::apply) needs for a compaction. The compaction may move sequences to
    /// slots that were never used. Moves at the end of a step need no memory, because they go to the first slots.
    pub fn reserve_moves(&mut self, moves: &[Move]) -> Result<()> {
        let reserved = self.reserve(|storage, group| {
            let ends = moves.iter().filter(|rows| rows.group == group).map(|rows| rows.to.end());
            ends.max().map_or(0, |end| storage.allocated(group, end))
        });
        reserved.inspect_err(|_| self.settle())
    }

    /// Returns the maximum number of additional bytes that a conversion of these layers needs at any time. Buffers are
    /// converted one after the other, and each old buffer is freed when its new buffer is complete.
    pub(super) fn besides(&self, formats: [KvFormat; 2], layers: Range<usize>) -> u64 {
        let (mut more, mut most) = (0i128, 0i128);
        for layer in layers {
            let made = self.slot_bytes(layer, formats);
            for ((slot, format), (old, old_slot)) in made.zip(self.buffers(layer)) {
                if old.format != format {
                    let bytes = |slots: i32, slot| i128::from(slots.max(0)) * i128::from(slot);
                    most = most.max(more + bytes(old.slots, slot));
                    more += bytes(old.slots, slot) - bytes(old.own(), old_slot);
                }
            }
        }
        u64::try_from(most).unwrap_or(u64::MAX)
    }

    /// Returns the bytes of the buffers. Each layer group uses `used` slots.
    pub fn memory(&self, used: impl Fn(usize) -> i32, at_capacity: u64) -> Memory {
        let mut shared: u64 = 0;
        let mut bytes = |layer: usize| {
            let used = used(self.layers.groups[layer]).max(0) as u64;
            self.buffers(layer).map(|(extent, slot)| {
                let shared_slots = extent.shared.max(0) as u64;
                shared = shared.saturating_add(shared_slots * slot);
                let used = used.saturating_sub(shared_slots);
                Bytes { allocated: extent.own() as u64 * slot, used: used * slot }
            })
        };
        let attention = 0..self.config.layers.len();
        let attention = attention.map(&mut bytes).map(|[k, v]| LayerMemory { k, v });
        let attention = attention.collect();
        let recurrent = self.layers.recurrent.iter().zip(&self.config.recurrent_layers);
        let recurrent = recurrent.map(|(&rows, layer)| {
            let anchors = layer.anchor().map_or_else(Bytes::default, |_| bytes(rows + 1)[0]);
            let [k, v] = bytes(rows);
            RecurrentMemory { rows: k + v, anchors }
        });
        let recurrent = recurrent.collect();
        Memory { shared, ..Memory::of(attention, recurrent, at_capacity) }
    }
}

/// Returns the bytes of this number of slots, or, on overflow, [`u64::MAX`], which the memory budget refuses.
pub(super) fn bytes_of(slots: i32, slot: u64) -> u64 {
    slot.saturating_mul(slots.max(0) as u64)
}
