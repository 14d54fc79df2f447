//! The buffers of a store: their layouts, and the properties that determine their numbers of slots.

use crate::config::{CacheConfig, LayerConfig, LayerGroups, LayerPolicy};
use crate::format::KvFormat;

/// Two buffers of a store with the same slots: keys and values, or the two parts of a recurrent layer's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreLayer {
    /// The number of heads in each buffer.
    pub heads: [i32; 2],
    /// The elements of one head's row in each buffer; 0 in the second if there is none.
    pub dims: [i32; 2],
    /// The number of elements at the start of a row in the first buffer that are read as the row's values. It is 0 in
    /// a layer with a second buffer.
    pub second_in_first: i32,
    /// The format of both buffers, if it is independent of the cache's formats.
    pub format: Option<KvFormat>,
}

impl StoreLayer {
    /// Returns the formats of the buffers in a cache that stores keys and values in `formats`.
    pub fn formats(&self, [first, second]: [KvFormat; 2]) -> [KvFormat; 2] {
        let first = self.format.unwrap_or(first);
        [first, if self.has_second() { self.format.unwrap_or(second) } else { first }]
    }

    /// Returns the bytes of one slot in each buffer, or [`u64::MAX`] on overflow.
    pub fn slot_bytes(&self, formats: [KvFormat; 2]) -> [u64; 2] {
        let formats = self.formats(formats);
        [0, 1].map(|buffer| self.slot_bytes_in(buffer, formats[buffer]))
    }

    /// Returns the bytes of one slot of a buffer in this format.
    pub fn slot_bytes_in(&self, buffer: usize, format: KvFormat) -> u64 {
        // A row has at most 8 times 2^31 bytes.
        let row = format.row_bytes(self.dims[buffer].max(0) as usize) as u64;
        row.saturating_mul(self.heads[buffer].max(0) as u64)
    }

    /// Returns whether there is a second buffer.
    pub fn has_second(&self) -> bool {
        self.dims[1] > 0
    }

    fn fixed(parts: [Option<[i32; 2]>; 2]) -> Self {
        let [[heads, dim], [more_heads, more_dim]] = parts.map(Option::unwrap_or_default);
        Self {
            heads: [heads, more_heads],
            dims: [dim, more_dim],
            second_in_first: 0,
            format: Some(KvFormat::F32),
        }
    }
}

impl From<&LayerConfig> for StoreLayer {
    fn from(layer: &LayerConfig) -> Self {
        let (heads, k, v) = (layer.n_kv_heads, layer.k_head_dim, layer.v_head_dim);
        match layer.values_in_keys {
            true => Self { heads: [heads, 0], dims: [k, 0], second_in_first: v, format: None },
            false => Self { heads: [heads; 2], dims: [k, v], second_in_first: 0, format: None },
        }
    }
}

/// The property of a layer that determines its slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotsOf {
    Attention(LayerPolicy),
    /// The rows of recurrent layers.
    Rows,
    /// The anchors of recurrences.
    Anchors,
}

/// The layers of a store, in groups with the same slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoreLayers {
    /// The attention layers, followed by the rows and the anchors of each recurrent layer.
    pub layers: Vec<StoreLayer>,
    /// The group of each layer.
    pub groups: Vec<usize>,
    /// The kind of each group, which determines its slots. The first has full history, even if no layer does.
    pub kinds: Vec<SlotsOf>,
    /// The index of each recurrent layer's rows in `layers`. The layer's anchors, if it has any, are the next entry
    /// of `layers`.
    pub recurrent: Vec<usize>,
}

impl StoreLayers {
    /// Returns the layers of a store for a valid config.
    pub fn of(config: &CacheConfig) -> Self {
        let LayerGroups { policies, of_layer: mut groups } =
            LayerGroups::with_full_history(&config.layers);
        let mut kinds: Vec<SlotsOf> = policies.into_iter().map(SlotsOf::Attention).collect();
        let mut layers: Vec<StoreLayer> = config.layers.iter().map(StoreLayer::from).collect();
        let mut recurrent = Vec::new();
        let rows = kinds.len();
        if !config.recurrent_layers.is_empty() {
            kinds.extend([SlotsOf::Rows, SlotsOf::Anchors]);
        }
        for layer in &config.recurrent_layers {
            recurrent.push(layers.len());
            layers.push(StoreLayer::fixed(layer.row()));
            groups.push(rows);
            if let Some(anchor) = layer.anchor() {
                layers.push(StoreLayer::fixed([Some(anchor), None]));
                groups.push(rows + 1);
            }
        }
        Self { layers, groups, kinds, recurrent }
    }
}
