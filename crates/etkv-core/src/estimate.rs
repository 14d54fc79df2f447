//! The bytes and slots of a cache with a config, computed without the cache.

use crate::bookkeeping::MAX_SEQUENCES;
use crate::config::{CacheConfig, LayerConfig, LayerPolicy, MAX_ANCHORS};
use crate::format::KvFormat;
use crate::growth::Growth;
use crate::memory::{Bytes, LayerMemory, Memory, RecurrentMemory};
use crate::store_layer::{SlotsOf, StoreLayer, StoreLayers};

impl CacheConfig {
    /// Returns the exact memory that a contiguous cache of this config reports after one sequence has grown to
    /// `length` positions. Needs no cache.
    pub fn estimate(&self, length: i32) -> Memory {
        self.estimate_of(length, false)
    }

    /// Does the same as [`estimate`](Self::estimate), but for a cache of kind "seq" or "tree" with one sequence.
    pub fn estimate_shared(&self, length: i32) -> Memory {
        self.estimate_of(length, true)
    }

    fn estimate_of(&self, length: i32, shared: bool) -> Memory {
        let length = length.clamp(0, self.capacity);
        let formats = self.formats_at(length);
        let StoreLayers { layers, groups, kinds, recurrent } = StoreLayers::of(self);
        let bytes = |id: usize| {
            let kind = kinds[groups[id]];
            let (needed, used) = self.slots_at(kind, length);
            let allocated = match (kind, self.growth) {
                // If sequences share no positions, every position may need its own slot.
                (SlotsOf::Attention(_), Growth::Upfront) if shared => self.capacity,
                _ => self.allocated(kind, needed, shared),
            };
            layers[id].slot_bytes(formats).map(|slot| Bytes {
                allocated: slot.saturating_mul(allocated as u64),
                used: slot.saturating_mul(used as u64),
            })
        };
        let attention = (0..self.layers.len()).map(bytes).map(|[k, v]| LayerMemory { k, v });
        let recurrent = recurrent.iter().zip(&self.recurrent_layers).map(|(&id, layer)| {
            let anchors = layer.anchor().map_or_else(Bytes::default, |_| bytes(id + 1)[0]);
            RecurrentMemory { rows: bytes(id)[0] + bytes(id)[1], anchors }
        });
        let at_capacity = if shared { self.at_capacity_shared() } else { self.at_capacity() };
        Memory::of(attention.collect(), recurrent.collect(), at_capacity)
    }

    /// For one sequence of `length` positions in layers of this kind, returns the maximum number of slots that the
    /// sequence has needed so far, and the number that it uses now.
    fn slots_at(&self, kind: SlotsOf, length: i32) -> (i32, i32) {
        match (kind, self.recurrent_window()) {
            (SlotsOf::Attention(policy), _) => {
                self.window(policy).map_or((length, length), |window| {
                    (length.min(window.slots()), window.held(length))
                })
            }
            (SlotsOf::Rows, Some(window)) => {
                (window.row_slots(length, self.capacity), window.held_rows(length))
            }
            (SlotsOf::Anchors, Some(window)) => {
                (window.anchor_slots(length), window.held_anchors(length))
            }
            (_, None) => (0, 0),
        }
    }

    /// Returns the maximum number of bytes that one sequence of any length needs.
    pub fn at_capacity(&self) -> u64 {
        let at = |length, [k_format, v_format]: [KvFormat; 2]| {
            self.bytes_at(length, k_format, v_format).unwrap_or(u64::MAX)
        };
        let whole = at(self.capacity, self.formats_at(self.capacity));
        match self.quantized_kv_start {
            // The rows in float before `quantized_kv_start` may need more memory than all rows need later.
            Some(_) => whole.max(at(self.max_floats(), [self.float_format; 2])),
            None => whole,
        }
    }

    fn bytes_at(&self, length: i32, k_format: KvFormat, v_format: KvFormat) -> Option<u64> {
        let StoreLayers { layers, groups, kinds, .. } = StoreLayers::of(self);
        layers.iter().zip(&groups).try_fold(0u64, |total, (layer, &group)| {
            let kind = kinds[group];
            let lead = self.recurrent_window().map_or(0, |window| window.lead);
            let needed = match (kind, self.slots_at(kind, length).0) {
                (SlotsOf::Attention(_), needed) => needed,
                // Rows of checkpoints are additional.
                (SlotsOf::Rows, needed) => {
                    needed.saturating_add(self.checkpoints.saturating_mul(lead)).min(self.capacity)
                }
                (SlotsOf::Anchors, _) => self.max_anchors(false),
            };
            add_bytes(total, layer, [k_format, v_format], self.allocated(kind, needed, false))
        })
    }

    /// Returns the maximum number of bytes that any number of sequences need. If sequences share no positions, every
    /// position may need a separate slot.
    pub fn at_capacity_shared(&self) -> u64 {
        let full = |layer: &LayerConfig| LayerConfig { policy: LayerPolicy::Full, ..*layer };
        let layers = self.layers.iter().map(full).collect();
        let attention = Self { layers, recurrent_layers: Vec::new(), ..self.clone() }.at_capacity();
        let anchors = self.max_anchors(true);
        let StoreLayers { layers, groups, kinds, .. } = StoreLayers::of(self);
        let recurrent = layers.iter().zip(&groups).skip(self.layers.len());
        let bytes = recurrent.into_iter().try_fold(attention, |total, (layer, &group)| {
            let slots = if kinds[group] == SlotsOf::Anchors { anchors } else { self.capacity };
            add_bytes(total, layer, [KvFormat::F32; 2], slots)
        });
        bytes.unwrap_or(u64::MAX)
    }

    /// Returns the maximum number of anchors of a cache. `shared` is true if the cache has several sequences.
    pub(crate) fn max_anchors(&self, shared: bool) -> i32 {
        let sequences = if shared { MAX_SEQUENCES } else { 1 };
        // During a step, a sequence has its earlier anchors and the anchors of the step.
        let own = 2 * self.anchors.clamp(0, MAX_ANCHORS) * sequences;
        own.saturating_add(self.checkpoints).min(self.capacity)
    }

    /// Returns the number of slots that buffers of this kind allocate if they need `needed` slots. `shared` is true
    /// if several sequences use the cache.
    pub(crate) fn allocated(&self, kind: SlotsOf, needed: i32, shared: bool) -> i32 {
        let (growth, capacity) = (self.growth, self.capacity);
        let everything = shared && growth == Growth::Upfront;
        let window = self.recurrent_window();
        match (kind, window) {
            (SlotsOf::Attention(policy), _) => match self.window(policy) {
                Some(window) if needed <= window.slots() && !everything => {
                    window.allocated(growth, needed)
                }
                // Several sequences, or trees, need more slots than one sequence.
                _ => growth.slots(needed, capacity),
            },
            (SlotsOf::Rows, Some(window)) => {
                let one = window.rows(capacity).max(1);
                if needed <= one {
                    growth.slots(needed, one)
                } else {
                    rounded_up(needed, one).min(capacity.max(needed))
                }
            }
            // Anchors are large, so they are allocated ahead only for `Upfront`.
            (SlotsOf::Anchors, Some(window)) => {
                let one = window.anchor_slots(capacity);
                match growth {
                    Growth::Upfront if needed <= one => one,
                    _ if needed <= one => needed.max(0),
                    _ => rounded_up(needed, 2),
                }
            }
            (_, None) => 0,
        }
    }
}

fn add_bytes(total: u64, layer: &StoreLayer, formats: [KvFormat; 2], slots: i32) -> Option<u64> {
    let [k, v] = layer.slot_bytes(formats);
    total.checked_add(k.checked_add(v)?.checked_mul(slots as u64)?)
}

fn rounded_up(needed: i32, chunk: i32) -> i32 {
    let chunks = (i64::from(needed) + i64::from(chunk) - 1) / i64::from(chunk);
    (chunks * i64::from(chunk)).min(i64::from(i32::MAX)) as i32
}
