//! Freezes the rows of a cache as a prefix, and attaches caches to prefixes.

use std::sync::Arc;

use crate::bookkeeping::Slots;
use crate::budget::Share;
use crate::error::Result;
use crate::prefix::{FrozenRows, Prefix};
use crate::store::Store;
use crate::store_layer::SlotsOf;

use super::memory::bytes_of;
use super::Storage;

/// The maximum number of prefixes in a chain. A buffer is mapped from one piece for each prefix. If a chain would be
/// longer, all its rows are copied into a single prefix.
const MAX_PIECES: usize = 4;

impl<S: Store> Storage<S> {
    /// Freezes, in each layer group, the slots up to the last slot of `held`. From now on the store reads these rows
    /// from the prefix.
    pub fn freeze(&mut self, held: &[Slots]) -> Result<Arc<FrozenRows<S>>> {
        self.check()?;
        let parent = self.prefix.clone();
        let anew = parent.as_ref().is_some_and(|parent| parent.depth() >= MAX_PIECES);
        let slots: Vec<i32> = self.layers.groups.iter().map(|&group| held[group].end()).collect();
        let bytes = self.sum(|group, extent, slot| {
            let shared = if anew { 0 } else { extent.shared };
            bytes_of(held[group].end() - shared, slot)
        });
        let mut share = Share::new("prefix");
        share.reserve_giving_way(bytes, S::give_way)?;
        let frozen = self.store.freeze(&slots, &self.most(), anew);
        self.unsettled = true;
        self.settle();
        let frozen = frozen?;
        let rows = FrozenRows::new(frozen, (bytes, share), parent.filter(|_| !anew));
        let rows = Arc::new(rows);
        self.prefix = Some(Arc::clone(&rows));
        self.frozen = held.iter().map(Slots::end).collect();
        Ok(rows)
    }

    /// Returns a storage with the same config that reads the rows of a prefix, in the slots `held` of each layer
    /// group. The prefix must fit.
    pub fn attached(&self, prefix: &Prefix, held: &[Slots]) -> Result<Self> {
        let (rows, snapshot) = (prefix.rows::<S>()?, prefix.snapshot());
        let mut made = Self::without_slots(self.config.clone(), self.shared, snapshot.formats)?;
        // In the budget both stores count as one holder. It stays registered until both are dropped.
        made.share = self.share.sibling();
        made.store.attach(rows.frozen()?, &made.most())?;
        made.prefix = Some(rows);
        made.frozen = held.iter().map(Slots::end).collect();
        let needed = |made: &Self, group: usize| made.allocated(group, held[group].end());
        let bytes = made.sum(|group, extent, slot| {
            bytes_of(needed(&made, group).max(extent.slots) - extent.shared, slot)
        });
        made.reserve_bytes(bytes)?;
        for (layer, &group) in self.layers.groups.iter().enumerate() {
            made.store.grow(layer, needed(&made, group))?;
        }
        made.unsettled = true;
        made.settle();
        made.awaits = snapshot.awaits;
        made.unchecked.clone_from(&self.unchecked);
        Ok(made)
    }

    /// Returns the maximum number of slots that each layer can need.
    fn most(&self) -> Vec<i32> {
        let capacity = self.config.capacity;
        let of = |&group: &usize| match self.layers.kinds[group] {
            SlotsOf::Attention(policy) => match self.config.window(policy) {
                Some(window) if !self.shared => window.slots().min(capacity),
                _ => capacity,
            },
            SlotsOf::Rows => capacity,
            SlotsOf::Anchors => self.config.max_anchors(self.shared),
        };
        self.layers.groups.iter().map(of).collect()
    }

    /// Reserves the memory for writes to slots whose rows are in a prefix. These rows and all shared rows after them
    /// then count as rows of this cache alone. `first` has, for each layer group, the first slot that is written.
    pub(super) fn reserve_own(&mut self, first: impl Fn(usize) -> Option<i32>) -> Result<()> {
        if self.prefix.is_none() {
            return Ok(());
        }
        let bytes = self.sum(|group, extent, slot| {
            first(group).map_or(0, |first| bytes_of(extent.shared - first, slot))
        });
        self.reserve_bytes(bytes)
    }
}
