//! Reports of a cache, for monitoring and debugging.

use serde::{Serialize, Serializer};

use crate::budget::{BudgetReport, HolderReport, MemoryBudget};
use crate::cache::Cache;
use crate::config::{CacheConfig, LayerConfig, LayerPolicy};
use crate::format::KvFormat;
use crate::growth::Growth;
use crate::memory::{Bytes, Memory};
use crate::registry::CacheRegistry;
use crate::store::Extent;

/// A report of a cache. `docs/reports.md` lists the fields in JSON.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CacheReport {
    /// The kind's name.
    pub kind: String,
    /// The positions that the cache holds. A position that several sequences share counts once.
    pub length: i32,
    /// The most positions that the cache can hold.
    pub capacity: i32,
    /// Whether a step is open.
    pub step_open: bool,
    /// The reason why the cache is poisoned, if it is.
    pub poisoned: Option<String>,
    /// The formats of keys and values now.
    pub formats: FormatsReport,
    /// The sequences that hold positions or carry trees, in order. Empty ones are left out. Kinds with one
    /// sequence number it 0.
    pub sequences: Vec<SequenceReport>,
    /// Bytes of all buffers.
    pub memory: MemoryReport,
    /// The buffers, layer by layer.
    pub layers: Vec<LayerReport>,
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
    /// Its number.
    pub sequence: i32,
    /// The positions that it holds.
    pub length: i32,
    /// The position of its next token.
    pub next: i32,
    /// The least length, apart from 0, that it can be rewound to.
    pub rewindable_to: i32,
    /// The number of nodes of the tree after it.
    pub tree: usize,
}

/// Bytes of all buffers.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct MemoryReport {
    /// Bytes of all buffers.
    pub allocated: u64,
    /// Those of the bytes that positions use.
    pub used: u64,
    /// Bytes of rows that the cache reads from a prefix, which other caches may read too. The other fields do
    /// not count them.
    pub shared: u64,
    /// The most bytes that the cache can ever hold.
    pub at_capacity: u64,
}

/// The buffers of a layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LayerReport {
    /// The buffer of its keys.
    pub k: BufferReport,
    /// The buffer of its values.
    pub v: BufferReport,
}

/// A buffer.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct BufferReport {
    /// The format of its rows, by name.
    #[serde(serialize_with = "as_name")]
    pub format: KvFormat,
    /// Slots allocated; absent if the kind does not report them.
    pub slots: Option<i32>,
    /// Bytes of the buffer.
    pub allocated: u64,
    /// Those of the bytes that positions use.
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
    /// Slots of a chunk; absent for growths without chunks.
    pub min_chunk: Option<i32>,
    #[serde(serialize_with = "as_name")]
    pub k_format: KvFormat,
    #[serde(serialize_with = "as_name")]
    pub v_format: KvFormat,
    pub quantized_kv_start: Option<i32>,
    #[serde(serialize_with = "as_name")]
    pub float_format: KvFormat,
    pub layers: Vec<LayerConfigReport>,
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
}

/// A report of this process. `docs/reports.md` lists the fields in JSON.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ProcessReport {
    /// The memory budget and its holders.
    pub memory: MemoryBudgetReport,
}

/// The memory budget, and how much of it each holder has.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct MemoryBudgetReport {
    /// The most bytes that may be held; absent without a limit.
    pub limit: Option<u64>,
    /// Bytes that are held.
    pub held: u64,
    /// Bytes of the limit that are free; absent without a limit.
    pub free: Option<u64>,
    /// The most bytes that were held or reserved.
    pub peak: u64,
    /// The number of caches, including empty ones.
    pub caches: usize,
    /// The holders, in the order in which they were created: caches, and kept prefixes.
    pub holders: Vec<HolderReport>,
}

impl ProcessReport {
    /// Returns the report of this process. It waits for no cache.
    pub fn now() -> Self {
        let (report, mut holders) = MemoryBudget::global().holders();
        for (key, holder) in CacheRegistry::global().holders() {
            if let Ok(at) = holders.binary_search_by_key(&holder, |found| found.id) {
                holders[at].keys.push(key);
            }
        }
        let BudgetReport { limit, held, peak, caches, .. } = report;
        let free = limit.map(|limit| limit.saturating_sub(held));
        Self { memory: MemoryBudgetReport { limit, held, free, peak, caches, holders } }
    }
}

fn as_name<S: Serializer>(format: &KvFormat, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(format)
}

impl CacheReport {
    /// Returns the report of a cache from its face alone: without sequences, slots, `step_open` and
    /// `poisoned`.
    pub fn of<C: Cache + ?Sized>(cache: &C) -> Self {
        let [k, v] = cache.formats();
        let Memory { allocated, used, shared, at_capacity, layers } = cache.memory();
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

impl ConfigReport {
    fn of(config: &CacheConfig) -> Self {
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
        }
    }
}

impl LayerConfigReport {
    fn of(layer: &LayerConfig) -> Self {
        let &LayerConfig { n_kv_heads, k_head_dim, v_head_dim, policy } = layer;
        let (window, sinks) = match policy {
            LayerPolicy::Full => (None, 0),
            LayerPolicy::Window { window, sinks } => (Some(window), sinks),
        };
        Self { n_kv_heads, k_head_dim, v_head_dim, window, sinks }
    }
}
