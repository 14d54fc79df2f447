//! Moves, zeroes and clears the rows of a cache, outside of steps.

use tracing::debug_span;

use super::Storage;
use crate::bookkeeping::{Move, Slots};
use crate::error::Result;
use crate::store::Store;
use crate::watch::TARGET;

impl<S: Store> Storage<S> {
    /// Zeroes these slots of each layer group. No step may be open.
    pub fn blank(&mut self, slots: impl Fn(usize) -> Slots) {
        S::exclusively(&mut || {
            let of_layer = |(layer, &group): (usize, &usize)| (layer, slots(group));
            let blank: Vec<_> = self.layers.groups.iter().enumerate().map(of_layer).collect();
            // Opens a step and rolls it back immediately.
            let begun = self.store.begin(&[]);
            if let Err(error) = begun.and_then(|saved| self.store.abort(saved, &blank)) {
                self.poison(error);
            }
        });
    }

    /// Moves rows, one buffer after the other. If that fails, the cache is poisoned.
    pub fn apply(&mut self, moves: &[Move]) -> Result<()> {
        if moves.is_empty() {
            return Ok(());
        }
        let _span = debug_span!(
            target: TARGET,
            "move",
            runs = moves.len(),
            slots = moves.iter().map(|rows| rows.from.len()).sum::<usize>()
        )
        .entered();
        let moved = self.try_apply(moves);
        self.unsettled = true;
        self.settle();
        if let Err(error) = &moved {
            self.poison(error.clone());
        }
        moved
    }

    fn try_apply(&mut self, moves: &[Move]) -> Result<()> {
        for Move { group, from, to } in moves {
            let all = 0..self.layers.groups.len();
            let layers: Vec<usize> =
                all.filter(|&layer| self.layers.groups[layer] == *group).collect();
            // Compaction may move sequences to slots that were never used, to leave room between them.
            let slots = self.allocated(*group, to.end());
            self.store.relocate(&layers, from, to, slots)?;
        }
        Ok(())
    }

    /// Empties the store, and keeps or frees its buffers. Freed buffers are allocated again in the next step, even if
    /// the config allocates upfront.
    ///
    /// # Errors
    /// [`Backend`](Status::Backend) if there is too little memory and the config allocates upfront. The store then
    /// keeps its rows, and a poisoned cache stays poisoned.
    pub fn clear(&mut self, release: bool) -> Result<()> {
        if self.poisoned.is_some() {
            // Buffers with unfinished work are useless. They occupy memory that the new buffers may need.
            self.store.release();
            self.unsettled = true;
            self.settle();
        }
        // Buffers that read a prefix are dropped: the next writes go to buffers of this cache alone.
        let release = release || self.prefix.is_some();
        let formats = self.config.formats_at(0);
        let slots = |&group: &usize| if release { 0 } else { self.allocated(group, 0) };
        let slots: Vec<i32> = self.layers.groups.iter().map(slots).collect();
        self.reserve_others(formats, &slots)?;
        let cleared = self.store.clear(formats, &slots);
        if release && cleared.is_ok() {
            self.store.release();
            self.prefix = None;
            self.frozen.clear();
        }
        self.unsettled = true;
        self.settle();
        cleared?;
        self.formats = formats;
        self.awaits = self.config.quantized_kv_start.is_some();
        self.poisoned = None;
        Ok(())
    }
}
