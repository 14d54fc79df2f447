//! What a cache is to be: the layers of the model, which are facts, and the
//! capacity and storage, which are the application's choice.

use crate::bookkeeping::Window;
use crate::error::{fail, Result};
use crate::format::KvFormat;
use crate::memory::{Bytes, LayerMemory, Memory};

/// What of a sequence a layer's queries see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum LayerPolicy {
    /// All of it.
    #[default]
    Full,
    /// The last `window` positions, the query's own among them, and the first
    /// `sinks` positions.
    Window {
        /// At least 1.
        window: i32,
        /// At least 0.
        sinks: i32,
    },
}

/// What one attention layer stores: facts of the model's architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerConfig {
    /// KV heads, not query heads.
    pub n_kv_heads: i32,
    /// Elements of one key.
    pub k_head_dim: i32,
    /// Elements of one value.
    pub v_head_dim: i32,
    /// What its queries see.
    pub policy: LayerPolicy,
}

/// How buffers grow as positions come. Always up to what the capacity needs, and
/// no further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Growth {
    /// `first` slots, doubled as needed.
    Doubling {
        /// Slots of the first allocation, at least 1.
        first: i32,
    },
    /// By `step` slots at a time.
    Step {
        /// At least 1.
        step: i32,
    },
    /// To the slots that a step needs: the least memory, and a copy at each step
    /// that grows.
    Exact,
    /// To the capacity, when the cache is made.
    Upfront,
}

impl Default for Growth {
    fn default() -> Self {
        Self::Doubling { first: Self::DEFAULT_CHUNK }
    }
}

impl Growth {
    /// Slots of the first allocation where nothing else is asked for.
    pub const DEFAULT_CHUNK: i32 = 256;

    /// Slots allocated where `needed` are, of at most `most`.
    pub fn slots(self, needed: i32, most: i32) -> i32 {
        if needed <= 0 && self != Self::Upfront {
            return 0;
        }
        let slots = match self {
            Self::Doubling { first } => {
                let mut slots = i64::from(first.max(1));
                while slots < i64::from(needed) {
                    slots *= 2;
                }
                slots
            }
            Self::Step { step } => {
                let step = i64::from(step.max(1));
                (i64::from(needed) + step - 1) / step * step
            }
            Self::Exact => i64::from(needed),
            Self::Upfront => i64::from(most),
        };
        // `most` is an i32, so the least of the two is one as well.
        slots.min(i64::from(most)) as i32
    }
}

/// What a cache is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheConfig {
    /// One entry a layer, in the order of the program's layer ids.
    pub layers: Vec<LayerConfig>,
    /// The most positions that the cache holds.
    pub capacity: i32,
    /// The most tokens of one step in a cache with window layers, which keep so
    /// much besides the window that a step can be taken back.
    pub max_step: i32,
    /// How buffers grow.
    pub growth: Growth,
    /// Storage of keys.
    pub k_format: KvFormat,
    /// Storage of values.
    pub v_format: KvFormat,
    /// Where there is one: rows are stored in `float_format` until the cache
    /// holds this many positions, and are then converted, once.
    pub quantize_after: Option<i32>,
    /// Storage of both before `quantize_after`.
    pub float_format: KvFormat,
}

impl CacheConfig {
    /// The most tokens of a step where nothing else is asked for.
    pub const DEFAULT_MAX_STEP: i32 = 256;

    /// A config of `n_layers` equal layers of full history with float16 storage.
    pub fn uniform(n_layers: usize, n_kv_heads: i32, head_dim: i32, capacity: i32) -> Self {
        let layer = LayerConfig {
            n_kv_heads,
            k_head_dim: head_dim,
            v_head_dim: head_dim,
            policy: LayerPolicy::Full,
        };
        Self {
            layers: vec![layer; n_layers],
            capacity,
            max_step: Self::DEFAULT_MAX_STEP,
            growth: Growth::default(),
            k_format: KvFormat::default(),
            v_format: KvFormat::default(),
            quantize_after: None,
            float_format: KvFormat::default(),
        }
    }

    /// The same with keys and values stored in `format`.
    pub fn stored_as(self, format: KvFormat) -> Self {
        Self { k_format: format, v_format: format, ..self }
    }

    /// Refuses what cannot be.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument), naming the field.
    pub fn validate(&self) -> Result<()> {
        if self.layers.is_empty() {
            fail!(InvalidArgument, "a cache needs at least 1 layer");
        }
        at_least(1, "capacity", self.capacity)?;
        at_least(1, "max_step", self.max_step)?;
        match self.growth {
            Growth::Doubling { first } => at_least(1, "the first chunk", first)?,
            Growth::Step { step } => at_least(1, "the growth step", step)?,
            Growth::Exact | Growth::Upfront => {}
        }
        if let Some(tokens) = self.quantize_after {
            at_least(1, "quantize_after", tokens)?;
            if !self.float_format.is_float() {
                fail!(
                    InvalidArgument,
                    "float_format is {}, it is f32, f16 or bf16",
                    self.float_format
                );
            }
        }
        for (id, layer) in self.layers.iter().enumerate() {
            self.validate_layer(layer).map_err(|error| error.at(format_args!("layer {id}")))?;
        }
        if self.most_bytes().is_none() {
            fail!(
                InvalidArgument,
                "a capacity of {} needs more than 2^64 bytes for these layers",
                self.capacity
            );
        }
        Ok(())
    }

    fn validate_layer(&self, layer: &LayerConfig) -> Result<()> {
        at_least(1, "n_kv_heads", layer.n_kv_heads)?;
        at_least(1, "k_head_dim", layer.k_head_dim)?;
        at_least(1, "v_head_dim", layer.v_head_dim)?;
        if let LayerPolicy::Window { window, sinks } = layer.policy {
            at_least(1, "window", window)?;
            at_least(0, "sinks", sinks)?;
        }
        self.k_format.check(layer.k_head_dim).map_err(|error| error.at("keys"))?;
        self.v_format.check(layer.v_head_dim).map_err(|error| error.at("values"))
    }

    /// The window that a layer of this policy keeps; none for full history.
    pub fn window(&self, policy: LayerPolicy) -> Option<Window> {
        match policy {
            LayerPolicy::Full => None,
            LayerPolicy::Window { window, sinks } => {
                Some(Window::new(window, sinks, self.max_step.min(self.capacity), self.capacity))
            }
        }
    }

    /// Slots that a layer of this policy has allocated when one sequence has
    /// grown to `length` positions.
    pub fn slots_for(&self, policy: LayerPolicy, length: i32) -> i32 {
        match self.window(policy) {
            None => self.growth.slots(length, self.capacity),
            Some(window) => window.allocated(self.growth, length),
        }
    }

    /// The formats of keys and values in a cache that has grown to `length`
    /// positions.
    pub fn formats_at(&self, length: i32) -> [KvFormat; 2] {
        match self.quantize_after {
            Some(tokens) if length < tokens => [self.float_format; 2],
            _ => [self.k_format, self.v_format],
        }
    }

    /// What a cache of this config holds when one sequence has grown to `length`
    /// positions, to the byte: before it is made, the memory it will report.
    pub fn estimate(&self, length: i32) -> Memory {
        let length = length.clamp(0, self.capacity);
        let [k_format, v_format] = self.formats_at(length);
        let layers = self
            .layers
            .iter()
            .map(|layer| {
                let allocated = self.slots_for(layer.policy, length);
                let used = self.window(layer.policy).map_or(length, |window| window.held(length));
                let bytes = |format: KvFormat, head_dim| {
                    let slot = slot_bytes(layer, format, head_dim);
                    Bytes {
                        allocated: slot.saturating_mul(allocated as u64),
                        used: slot.saturating_mul(used as u64),
                    }
                };
                LayerMemory {
                    k: bytes(k_format, layer.k_head_dim),
                    v: bytes(v_format, layer.v_head_dim),
                }
            })
            .collect();
        Memory::of(layers, self.at_capacity())
    }

    /// The most bytes that one sequence of any length needs.
    pub fn at_capacity(&self) -> u64 {
        let at = |length| {
            let [k_format, v_format] = self.formats_at(length);
            self.bytes_at(length, k_format, v_format).unwrap_or(u64::MAX)
        };
        match self.quantize_after {
            // The floats may be larger than all that comes after them.
            Some(tokens) => at(self.capacity).max(at((tokens - 1).min(self.capacity))),
            None => at(self.capacity),
        }
    }

    fn bytes_at(&self, length: i32, k_format: KvFormat, v_format: KvFormat) -> Option<u64> {
        self.layers.iter().try_fold(0u64, |total, layer| {
            let slots = self.slots_for(layer.policy, length) as u64;
            let k = checked_slot_bytes(layer, k_format, layer.k_head_dim)?;
            let v = checked_slot_bytes(layer, v_format, layer.v_head_dim)?;
            total.checked_add(k.checked_add(v)?.checked_mul(slots)?)
        })
    }

    fn most_bytes(&self) -> Option<u64> {
        let every_slot = |k_format, v_format| {
            let full = Self {
                layers: self
                    .layers
                    .iter()
                    .map(|layer| LayerConfig { policy: LayerPolicy::Full, ..*layer })
                    .collect(),
                ..self.clone()
            };
            full.bytes_at(self.capacity, k_format, v_format)
        };
        every_slot(self.k_format, self.v_format)?;
        every_slot(self.float_format, self.float_format)
    }
}

/// Bytes of one slot of a layer's keys or values.
pub(crate) fn slot_bytes(layer: &LayerConfig, format: KvFormat, head_dim: i32) -> u64 {
    checked_slot_bytes(layer, format, head_dim).unwrap_or(u64::MAX)
}

fn checked_slot_bytes(layer: &LayerConfig, format: KvFormat, head_dim: i32) -> Option<u64> {
    // A row is at most 8 times 2^31 bytes.
    (format.row_bytes(head_dim as usize) as u64).checked_mul(layer.n_kv_heads as u64)
}

fn at_least(least: i32, name: &str, value: i32) -> Result<()> {
    if value < least {
        fail!(InvalidArgument, "{name} is {value}, the least is {least}");
    }
    Ok(())
}
