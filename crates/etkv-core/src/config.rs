//! The config of a cache. The layers are facts of the model; the application chooses capacity and storage.

use std::fmt;

use crate::bookkeeping::{RecurrentWindow, Window};
use crate::error::{fail, Error, Result};
use crate::format::KvFormat;
use crate::growth::Growth;
use crate::recurrent_layer::{window_of, RecurrentLayer};

/// The positions of a sequence that a layer's queries see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum LayerPolicy {
    /// The whole sequence.
    #[default]
    Full,
    /// The last `window` positions, including the query's own, and the first `sinks` positions.
    Window {
        /// The number of positions, at least 1.
        window: i32,
        /// The number of positions, at least 0.
        sinks: i32,
    },
    /// The positions of the query's chunk, up to the query's own position. Chunks begin at multiples of `chunk`.
    Chunk {
        /// The number of positions, at least 1.
        chunk: i32,
    },
}

impl fmt::Display for LayerPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full history"),
            Self::Window { window, sinks } => {
                write!(f, "a window of {window} and {sinks} sinks")
            }
            Self::Chunk { chunk } => write!(f, "chunks of {chunk}"),
        }
    }
}

/// The sizes of one attention layer, which are facts of the model's architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerConfig {
    /// The number of KV heads, not of query heads.
    pub n_kv_heads: i32,
    /// The number of elements of one key.
    pub k_head_dim: i32,
    /// The number of elements of one value.
    pub v_head_dim: i32,
    /// The positions that the layer's queries see.
    pub policy: LayerPolicy,
    /// Whether a value is the first `v_head_dim` elements of its key, as in latent attention. Such a layer stores
    /// only keys, in the keys' format.
    pub values_in_keys: bool,
}

/// The layers of a cache in groups that share a policy. A step uses the same slots in all layers of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerGroups {
    /// The policy of each group.
    pub policies: Vec<LayerPolicy>,
    /// The group of each layer.
    pub of_layer: Vec<usize>,
}

impl LayerGroups {
    /// Returns the groups in the order of their first layers.
    pub fn of(layers: &[LayerConfig]) -> Self {
        Self { policies: Vec::new(), of_layer: Vec::with_capacity(layers.len()) }.with(layers)
    }

    /// Returns the groups of a cache's plans. The first has full history, even if no layer does.
    pub(crate) fn with_full_history(layers: &[LayerConfig]) -> Self {
        Self { policies: vec![LayerPolicy::Full], of_layer: Vec::new() }.with(layers)
    }

    fn with(mut self, layers: &[LayerConfig]) -> Self {
        for layer in layers {
            let known = self.policies.iter().position(|&policy| policy == layer.policy);
            self.of_layer.push(known.unwrap_or(self.policies.len()));
            if known.is_none() {
                self.policies.push(layer.policy);
            }
        }
        self
    }
}

/// The maximum number of anchors of a sequence.
pub(crate) const MAX_ANCHORS: i32 = 64;
const MAX_CHECKPOINTS: i32 = 256;

/// The config of a cache: layers, capacity, growth and storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheConfig {
    /// One entry for each attention layer, in the order of the program's layer ids.
    pub layers: Vec<LayerConfig>,
    /// One entry for each recurrent layer, in the order of the program's ids of these layers.
    pub recurrent_layers: Vec<RecurrentLayer>,
    /// The number of anchors that a sequence keeps in recurrences, at least 1. With n anchors, a sequence can be
    /// rewound by at least n - 1 blocks. An anchor takes the memory of one state of each recurrence.
    pub anchors: i32,
    /// The maximum number of checkpoints of the cache, from 0 to 256. A checkpoint takes the memory of one state of
    /// each recurrence.
    pub checkpoints: i32,
    /// The maximum number of positions of the cache.
    pub capacity: i32,
    /// The maximum number of tokens of one step in a cache with window layers. These layers keep that many positions
    /// in addition to the window, so that a step can be rolled back. `max_step_tokens` also limits the step that
    /// reaches `quantized_kv_start`, because the rows of that step are stored in float before they are converted.
    pub max_step_tokens: i32,
    /// How the buffers grow.
    pub growth: Growth,
    /// The format of keys, and of values that are in keys.
    pub k_format: KvFormat,
    /// The format of values that are not in keys. If no layer has such values, it must equal `k_format`.
    pub v_format: KvFormat,
    /// If set, rows are stored in `float_format` until the cache has this many positions. Then all rows are
    /// converted, once.
    pub quantized_kv_start: Option<i32>,
    /// The format of keys and values before `quantized_kv_start`.
    pub float_format: KvFormat,
}

impl CacheConfig {
    /// The default of `max_step_tokens`.
    pub const DEFAULT_MAX_STEP_TOKENS: i32 = 512;

    /// The maximum number of layers of either sort. A program that reports more is damaged.
    pub const MAX_LAYERS: i32 = 65_536;

    /// The default of `anchors`.
    pub const DEFAULT_ANCHORS: i32 = 2;

    /// The default of `checkpoints`.
    pub const DEFAULT_CHECKPOINTS: i32 = 32;

    /// Returns a config of `n_layers` equal layers with full history and float16 storage.
    pub fn uniform(n_layers: usize, n_kv_heads: i32, head_dim: i32, capacity: i32) -> Self {
        let layer = LayerConfig {
            n_kv_heads,
            k_head_dim: head_dim,
            v_head_dim: head_dim,
            policy: LayerPolicy::Full,
            values_in_keys: false,
        };
        Self {
            layers: vec![layer; n_layers],
            recurrent_layers: Vec::new(),
            anchors: Self::DEFAULT_ANCHORS,
            checkpoints: Self::DEFAULT_CHECKPOINTS,
            capacity,
            max_step_tokens: Self::DEFAULT_MAX_STEP_TOKENS,
            growth: Growth::default(),
            k_format: KvFormat::default(),
            v_format: KvFormat::default(),
            quantized_kv_start: None,
            float_format: KvFormat::default(),
        }
    }

    /// Returns the config with keys and values stored in `format`.
    pub fn stored_as(self, format: KvFormat) -> Self {
        Self { k_format: format, v_format: format, ..self }
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument), with the name of the field in the message.
    pub fn validate(&self) -> Result<()> {
        if self.layers.is_empty() && self.recurrent_layers.is_empty() {
            fail!(InvalidArgument, "a cache needs at least 1 layer");
        }
        at_least(1, "anchors", self.anchors)?;
        at_least(0, "checkpoints", self.checkpoints)?;
        at_most(MAX_ANCHORS, "anchors", self.anchors)?;
        at_most(MAX_CHECKPOINTS, "checkpoints", self.checkpoints)?;
        at_least(1, "capacity", self.capacity)?;
        at_least(1, "max_step_tokens", self.max_step_tokens)?;
        match self.growth {
            Growth::Doubling { first } => at_least(1, "min_chunk", first)?,
            Growth::Step { step } => at_least(1, "the growth step", step)?,
            Growth::Exact | Growth::Upfront => {}
        }
        if let Some(tokens) = self.quantized_kv_start {
            at_least(1, "quantized_kv_start", tokens)?;
            if !self.float_format.is_float() {
                fail!(
                    InvalidArgument,
                    "expected float_format f32, f16 or bf16, got {}",
                    self.float_format
                );
            }
        }
        for (id, layer) in self.layers.iter().enumerate() {
            validate_layer(layer).map_err(|error| error.at(format_args!("layer {id}")))?;
        }
        self.check_formats([self.k_format, self.v_format])?;
        for (id, layer) in self.recurrent_layers.iter().enumerate() {
            let checked = layer.validate();
            checked.map_err(|error| error.at(format_args!("recurrent layer {id}")))?;
        }
        if self.at_capacity_shared() == u64::MAX {
            fail!(
                InvalidArgument,
                "a capacity of {} needs more than 2^64 bytes for these layers; choose a smaller capacity",
                self.capacity
            );
        }
        Ok(())
    }

    /// Checks that the layers' rows fit these formats of keys and values.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for rows that do not fit, with the number of the layer,
    /// and for a format of values if no layer stores values.
    pub(crate) fn check_formats(&self, [k, v]: [KvFormat; 2]) -> Result<()> {
        for (id, layer) in self.layers.iter().enumerate() {
            let at = |what| move |error: Error| error.at(format_args!("layer {id}: {what}"));
            k.check(layer.k_head_dim).map_err(at("keys"))?;
            if !layer.values_in_keys {
                v.check(layer.v_head_dim).map_err(at("values"))?;
            }
        }
        let all_in_keys = self.layers.iter().all(|layer| layer.values_in_keys);
        if all_in_keys && !self.layers.is_empty() && k != v {
            fail!(
                InvalidArgument,
                "v_format is {v}, but the values of every layer are in its keys, which k_format stores as {k}; \
                 give both the same format"
            );
        }
        Ok(())
    }

    /// Returns the maximum number of tokens of one step: `max_step_tokens` if a window slides or rows await
    /// quantization, else the capacity.
    pub fn step_limit(&self) -> i32 {
        let slides =
            |layer: &LayerConfig| self.window(layer.policy).is_some_and(|window| window.slides());
        if self.quantized_kv_start.is_some() || self.layers.iter().any(slides) {
            self.max_step_tokens.min(self.capacity)
        } else {
            self.capacity
        }
    }

    /// Returns the window of recurrent layers, or `None` if there are none.
    pub fn recurrent_window(&self) -> Option<RecurrentWindow> {
        window_of(&self.recurrent_layers, self.anchors)
    }

    /// Returns the window of a layer with this policy, or `None` for full history.
    pub fn window(&self, policy: LayerPolicy) -> Option<Window> {
        let (step, capacity) = (self.max_step_tokens.min(self.capacity), self.capacity);
        match policy {
            LayerPolicy::Full => None,
            LayerPolicy::Window { window, sinks } => {
                Some(Window::new(window, sinks, step, capacity))
            }
            LayerPolicy::Chunk { chunk } => Some(Window::chunked(chunk, step, capacity)),
        }
    }

    /// Returns the number of slots that a layer of this policy allocates for one sequence of `length` positions.
    pub fn slots_for(&self, policy: LayerPolicy, length: i32) -> i32 {
        match self.window(policy) {
            None => self.growth.slots(length, self.capacity),
            Some(window) => window.allocated(self.growth, length),
        }
    }

    /// Returns the formats of keys and values in a cache of `length` positions.
    pub fn formats_at(&self, length: i32) -> [KvFormat; 2] {
        match self.quantized_kv_start {
            Some(tokens) if length < tokens => [self.float_format; 2],
            _ => [self.k_format, self.v_format],
        }
    }

    /// Returns the maximum number of positions that are stored in `float_format` before `quantized_kv_start`. The
    /// rows of a step are stored before they are converted.
    pub(crate) fn max_floats(&self) -> i32 {
        let before = self.quantized_kv_start.map_or(0, |tokens| tokens.saturating_sub(1));
        before.saturating_add(self.max_step_tokens).min(self.capacity)
    }
}

fn validate_layer(layer: &LayerConfig) -> Result<()> {
    at_least(1, "n_kv_heads", layer.n_kv_heads)?;
    at_least(1, "k_head_dim", layer.k_head_dim)?;
    at_least(1, "v_head_dim", layer.v_head_dim)?;
    if layer.values_in_keys && layer.v_head_dim > layer.k_head_dim {
        let LayerConfig { k_head_dim, v_head_dim, .. } = layer;
        fail!(
            InvalidArgument,
            "v_head_dim is {v_head_dim}, but values in keys have at most the {k_head_dim} elements of a key"
        );
    }
    match layer.policy {
        LayerPolicy::Full => {}
        LayerPolicy::Window { window, sinks } => {
            at_least(1, "window", window)?;
            at_least(0, "sinks", sinks)?;
        }
        LayerPolicy::Chunk { chunk } => at_least(1, "chunk", chunk)?,
    }
    Ok(())
}

fn at_most(most: i32, name: &str, value: i32) -> Result<()> {
    if value > most {
        fail!(InvalidArgument, "{name} is {value}, the maximum is {most}");
    }
    Ok(())
}

fn at_least(least: i32, name: &str, value: i32) -> Result<()> {
    if value < least {
        fail!(InvalidArgument, "{name} is {value}, the minimum is {least}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Bytes, LayerMemory};

    fn windowed(window: i32, sinks: i32) -> LayerConfig {
        let policy = LayerPolicy::Window { window, sinks };
        LayerConfig { n_kv_heads: 1, k_head_dim: 4, v_head_dim: 4, policy, values_in_keys: false }
    }

    #[test]
    fn slots_do_not_overflow() {
        for growth in [Growth::Doubling { first: i32::MAX }, Growth::Step { step: i32::MAX - 1 }] {
            assert_eq!(growth.slots(i32::MAX, i32::MAX), i32::MAX);
        }
        let config = CacheConfig {
            layers: vec![windowed(i32::MAX, i32::MAX)],
            max_step_tokens: i32::MAX,
            ..CacheConfig::uniform(1, 1, 1, i32::MAX)
        };
        assert_eq!(config.slots_for(config.layers[0].policy, i32::MAX), i32::MAX);
    }

    #[test]
    fn estimates_count_keys_and_values_of_every_layer() {
        let config = CacheConfig {
            k_format: KvFormat::F32,
            growth: Growth::Exact,
            ..CacheConfig::uniform(2, 3, 64, 10)
        };
        let layer = LayerMemory {
            k: Bytes { allocated: 10 * 3 * 256, used: 10 * 3 * 256 },
            v: Bytes { allocated: 10 * 3 * 128, used: 10 * 3 * 128 },
        };
        assert_eq!(config.estimate(10).layers, [layer, layer]);
        assert_eq!(config.estimate(10).allocated, 2 * 10 * 3 * 384);
        assert_eq!(config.estimate(99), config.estimate(10), "no more than the capacity");
    }

    #[test]
    fn values_in_keys_take_no_bytes() {
        let latent = LayerConfig {
            n_kv_heads: 1,
            k_head_dim: 576,
            v_head_dim: 512,
            policy: LayerPolicy::Full,
            values_in_keys: true,
        };
        let config = CacheConfig {
            layers: vec![latent; 2],
            growth: Growth::Exact,
            ..CacheConfig::uniform(0, 1, 1, 10)
        };
        config.validate().unwrap();
        let keys = Bytes { allocated: 10 * 1152, used: 10 * 1152 };
        let layer = LayerMemory { k: keys, v: Bytes::default() };
        assert_eq!(config.estimate(10).layers, [layer, layer]);
        assert_eq!(config.at_capacity(), 2 * 10 * 1152);
        assert_eq!(config.at_capacity_shared(), 2 * 10 * 1152);

        // 500 is not a multiple of 64, but these values are in keys and have no scales.
        let format = KvFormat::Affine { bits: 8, group: 64 };
        let mut other = config.clone().stored_as(format);
        other.layers[0].v_head_dim = 500;
        other.validate().unwrap();
        assert_eq!(other.at_capacity(), 2 * 10 * (576 + 9 * 4));
        other.v_format = KvFormat::F32;
        let refused = other.validate().unwrap_err().to_string();
        assert!(refused.starts_with("v_format is f32, but the values of every layer"), "{refused}");
        other.layers[1].values_in_keys = false;
        other.validate().unwrap();
        assert_eq!(other.at_capacity(), 10 * (2 * 612 + 512 * 4));
        other.layers[0].v_head_dim = 577;
        let refused = other.validate().unwrap_err().to_string();
        let expected =
            "layer 0: v_head_dim is 577, but values in keys have at most the 576 elements of a key";
        assert_eq!(refused, expected);
    }

    #[test]
    fn a_window_ends_its_layers_growth() {
        let config = CacheConfig {
            layers: vec![windowed(100, 4)],
            max_step_tokens: 10,
            ..CacheConfig::uniform(1, 1, 1, 10_000)
        };
        let slots = |length| config.slots_for(config.layers[0].policy, length);
        // Sinks, window, two steps, and a quarter of a window as room.
        assert_eq!(slots(10_000), 4 + 99 + 20 + 25);
        assert_eq!(slots(149), 148);
    }

    #[test]
    fn only_windows_and_quantization_limit_a_step() {
        let config = CacheConfig { max_step_tokens: 10, ..CacheConfig::uniform(1, 1, 4, 1000) };
        let of = |change: fn(&mut CacheConfig)| {
            let mut config = config.clone();
            change(&mut config);
            config.step_limit()
        };
        assert_eq!(of(|_| ()), 1000);
        assert_eq!(of(|config| config.layers.push(windowed(100, 4))), 10);
        assert_eq!(of(|config| config.quantized_kv_start = Some(1)), 10);
        assert_eq!(of(|config| config.layers.push(windowed(1000, 0))), 1000, "it never slides");
        assert_eq!(of(|config| (config.quantized_kv_start, config.capacity) = (Some(1), 7)), 7);
    }

    #[test]
    fn floats_count_until_they_are_converted() {
        let config = CacheConfig {
            quantized_kv_start: Some(100),
            growth: Growth::Exact,
            ..CacheConfig::uniform(1, 1, 64, 1000).stored_as(KvFormat::RowInt4)
        };
        assert_eq!(config.estimate(99).allocated, 2 * 99 * 128);
        assert_eq!(config.estimate(100).allocated, 2 * 100 * 34);
        // A step of 512 tokens is stored as floats before all rows are converted.
        assert_eq!(config.at_capacity(), 2 * (99 + 512) * 128);
        assert_eq!(
            CacheConfig { max_step_tokens: 1, ..config.clone() }.at_capacity(),
            2 * 1000 * 34
        );
        assert_eq!(CacheConfig { capacity: 101, ..config }.at_capacity(), 2 * 101 * 128);
    }

    #[test]
    fn sizes_above_64_bits_are_refused() {
        let mut config = CacheConfig::uniform(1, i32::MAX, i32::MAX, i32::MAX);
        assert!(config.validate().unwrap_err().message().contains("2^64"));
        config.capacity = 1;
        assert!(config.validate().is_ok());
    }

    #[test]
    fn an_invalid_field_is_named() {
        let good = CacheConfig::uniform(2, 1, 64, 8);
        assert!(good.validate().is_ok());
        let message = |change: fn(&mut CacheConfig)| {
            let mut config = good.clone();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        assert_eq!(message(|c| c.capacity = 0), "capacity is 0, the minimum is 1");
        assert_eq!(message(|c| c.max_step_tokens = 0), "max_step_tokens is 0, the minimum is 1");
        assert_eq!(
            message(|c| c.growth = Growth::Doubling { first: -1 }),
            "min_chunk is -1, the minimum is 1"
        );
        assert_eq!(message(|c| c.layers.clear()), "a cache needs at least 1 layer");
        assert_eq!(
            message(|c| c.layers[1].v_head_dim = 0),
            "layer 1: v_head_dim is 0, the minimum is 1"
        );
        assert_eq!(
            message(|c| c.layers[1] = windowed(0, 0)),
            "layer 1: window is 0, the minimum is 1"
        );
        assert_eq!(
            message(|c| c.layers[0] = windowed(9, -1)),
            "layer 0: sinks is -1, the minimum is 0"
        );
        assert_eq!(
            message(|c| c.k_format = KvFormat::Affine { bits: 4, group: 128 }),
            "layer 0: keys: affine4g128 needs a head_dim that is a multiple of 128, got head_dim 64"
        );
        assert_eq!(
            message(|c| {
                c.quantized_kv_start = Some(8);
                c.float_format = KvFormat::Mxfp8;
            }),
            "expected float_format f32, f16 or bf16, got mxfp8"
        );
    }
}
