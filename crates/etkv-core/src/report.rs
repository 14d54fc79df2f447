//! Reports of a cache, for monitoring and debugging.

use serde::{Serialize, Serializer};

use crate::config::{CacheConfig, LayerConfig, LayerPolicy};
use crate::format::KvFormat;
use crate::growth::Growth;
use crate::memory::Bytes;
use crate::recurrent_layer::RecurrentLayer;

/// A report of a cache. `docs/reports.md` lists the fields in JSON.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CacheReport {
    /// The name of the kind.
    pub kind: String,
    /// The number of positions in the cache. A position that several sequences share counts once.
    pub length: i32,
    /// The maximum number of positions of the cache.
    pub capacity: i32,
    /// Whether a step is open.
    pub step_open: bool,
    /// The reason why the cache is poisoned, if it is.
    pub poisoned: Option<String>,
    /// The current formats of keys and values.
    pub formats: FormatsReport,
    /// The sequences that have positions or trees, in order. In a kind with one sequence, the sequence's number is 0.
    pub sequences: Vec<SequenceReport>,
    /// The bytes of all buffers.
    pub memory: MemoryReport,
    /// The buffers of attention, layer by layer.
    pub layers: Vec<LayerReport>,
    /// The buffers of recurrent layers, layer by layer; absent if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub recurrent_layers: Vec<RecurrentLayerReport>,
    /// The config that the cache was created with.
    pub config: ConfigReport,
}

/// The formats of keys and values, by name.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs)]
#[non_exhaustive]
pub struct FormatsReport {
    #[serde(serialize_with = "as_name")]
    pub k: KvFormat,
    #[serde(serialize_with = "as_name")]
    pub v: KvFormat,
}

/// A sequence.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct SequenceReport {
    /// The number of the sequence.
    pub sequence: i32,
    /// The number of positions of the sequence.
    pub length: i32,
    /// The position of the sequence's next token.
    pub next: i32,
    /// The least length, other than 0, to which the sequence can be rewound without a checkpoint. It can also be
    /// rewound to every greater length.
    pub rewindable_to: i32,
    /// Lower lengths, other than 0, to which the sequence can also be rewound; absent if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub checkpoints: Vec<i32>,
    /// The number of nodes of the tree after the sequence.
    pub tree: usize,
}

/// The bytes of all buffers.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct MemoryReport {
    /// The bytes of all buffers.
    pub allocated: u64,
    /// The allocated bytes that positions use.
    pub used: u64,
    /// The bytes of the prefix's rows that the cache reads. Other caches may read them too. The other fields do not
    /// include them.
    pub shared: u64,
    /// The maximum number of bytes that the cache can ever allocate.
    pub at_capacity: u64,
}

/// The buffers of a layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LayerReport {
    /// The buffer of the keys.
    pub k: BufferReport,
    /// The buffer of the values.
    pub v: BufferReport,
}

/// The buffers of a recurrent layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RecurrentLayerReport {
    /// The rows of the last tokens.
    pub rows: BytesReport,
    /// States at fixed positions; 0 bytes for a convolution.
    pub anchors: BytesReport,
}

/// The bytes of some buffers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct BytesReport {
    /// The bytes that are allocated.
    pub allocated: u64,
    /// The allocated bytes that positions use.
    pub used: u64,
}

impl From<Bytes> for BytesReport {
    fn from(Bytes { allocated, used }: Bytes) -> Self {
        Self { allocated, used }
    }
}

/// A buffer.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct BufferReport {
    /// The name of the format of its rows.
    #[serde(serialize_with = "as_name")]
    pub format: KvFormat,
    /// The number of allocated slots; absent if the kind does not report it.
    pub slots: Option<i32>,
    /// The bytes of the buffer.
    pub allocated: u64,
    /// The allocated bytes that positions use.
    pub used: u64,
}

/// The config of a cache; see [`CacheConfig`].
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs)]
#[non_exhaustive]
pub struct ConfigReport {
    pub capacity: i32,
    pub max_step_tokens: i32,
    /// `doubling`, `step`, `exact` or `upfront`.
    pub growth: &'static str,
    /// `first` or `step` of the growth; absent for `exact` and `upfront`.
    pub min_chunk: Option<i32>,
    #[serde(serialize_with = "as_name")]
    pub k_format: KvFormat,
    #[serde(serialize_with = "as_name")]
    pub v_format: KvFormat,
    pub quantized_kv_start: Option<i32>,
    #[serde(serialize_with = "as_name")]
    pub float_format: KvFormat,
    pub layers: Vec<LayerConfigReport>,
    /// This field and the next two are absent if there are no recurrent layers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub recurrent_layers: Vec<RecurrentLayer>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub anchors: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoints: Option<i32>,
}

/// A layer of a config; see [`LayerConfig`].
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs)]
#[non_exhaustive]
pub struct LayerConfigReport {
    pub n_kv_heads: i32,
    pub k_head_dim: i32,
    pub v_head_dim: i32,
    /// The window; absent for full history.
    pub window: Option<i32>,
    pub sinks: i32,
    /// The length of chunks; absent if the layer has none.
    pub chunk: Option<i32>,
    /// Whether the values are in the keys.
    pub values_in_keys: bool,
}

fn as_name<S: Serializer>(format: &KvFormat, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(format)
}

impl ConfigReport {
    pub(crate) fn of(config: &CacheConfig) -> Self {
        let (growth, min_chunk) = match config.growth {
            Growth::Doubling { first } => ("doubling", Some(first)),
            Growth::Step { step } => ("step", Some(step)),
            Growth::Exact => ("exact", None),
            Growth::Upfront => ("upfront", None),
        };
        Self {
            capacity: config.capacity,
            max_step_tokens: config.max_step_tokens,
            growth,
            min_chunk,
            k_format: config.k_format,
            v_format: config.v_format,
            quantized_kv_start: config.quantized_kv_start,
            float_format: config.float_format,
            layers: config.layers.iter().map(LayerConfigReport::of).collect(),
            recurrent_layers: config.recurrent_layers.clone(),
            anchors: config.recurrent_window().map(|window| window.anchors),
            checkpoints: config.recurrent_window().map(|_| config.checkpoints),
        }
    }
}

impl LayerConfigReport {
    fn of(layer: &LayerConfig) -> Self {
        let &LayerConfig { n_kv_heads, k_head_dim, v_head_dim, policy, values_in_keys } = layer;
        let (window, sinks, chunk) = match policy {
            LayerPolicy::Full => (None, 0, None),
            LayerPolicy::Window { window, sinks } => (Some(window), sinks, None),
            LayerPolicy::Chunk { chunk } => (None, 0, Some(chunk)),
        };
        Self { n_kv_heads, k_head_dim, v_head_dim, window, sinks, chunk, values_in_keys }
    }
}
