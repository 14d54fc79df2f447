//! Creates the report of a cache.

use super::Cache;
use crate::memory::{Bytes, Memory, RecurrentMemory};
use crate::report::{
    BufferReport, CacheReport, ConfigReport, FormatsReport, LayerReport, MemoryReport,
    RecurrentLayerReport,
};
use crate::store::Extent;

impl CacheReport {
    /// Returns the part of the report that every cache provides: without sequences, slots, `step_open` and
    /// `poisoned`.
    pub fn of<C: Cache + ?Sized>(cache: &C) -> Self {
        let [k, v] = cache.formats();
        let Memory { allocated, used, shared, at_capacity, layers, recurrent_layers } =
            cache.memory();
        let buffer = |format, Bytes { allocated, used }| BufferReport {
            format,
            slots: None,
            allocated,
            used,
        };
        Self {
            kind: cache.kind().to_owned(),
            length: cache.length(),
            capacity: cache.capacity(),
            step_open: false,
            poisoned: None,
            formats: FormatsReport { k, v },
            sequences: Vec::new(),
            memory: MemoryReport { allocated, used, shared, at_capacity },
            layers: layers
                .iter()
                .map(|layer| LayerReport { k: buffer(k, layer.k), v: buffer(v, layer.v) })
                .collect(),
            recurrent_layers: recurrent_layers
                .iter()
                .map(|&RecurrentMemory { rows, anchors }| RecurrentLayerReport {
                    rows: rows.into(),
                    anchors: anchors.into(),
                })
                .collect(),
            config: ConfigReport::of(cache.config()),
        }
    }

    /// Adds the extents of each layer's keys and values.
    pub(crate) fn with_extents(mut self, extents: impl Iterator<Item = [Extent; 2]>) -> Self {
        for (layer, [k, v]) in self.layers.iter_mut().zip(extents) {
            for (buffer, Extent { format, slots, .. }) in [(&mut layer.k, k), (&mut layer.v, v)] {
                (buffer.format, buffer.slots) = (format, Some(slots));
            }
        }
        self
    }
}
