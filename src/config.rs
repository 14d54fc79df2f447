//! What a cache is to be: the layers of the model, which are facts, and the
//! capacity and storage, which are the application's choice.

use crate::error::{fail, Result};

/// How keys or values are stored, independent of what the model computes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum KvFormat {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    #[default]
    F16,
    /// bfloat16.
    Bf16,
}

impl KvFormat {
    /// Bytes of one row of `head_dim` elements.
    pub const fn row_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F32 => 4 * head_dim,
            Self::F16 | Self::Bf16 => 2 * head_dim,
        }
    }
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
}

/// What a cache is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheConfig {
    /// One entry a layer, in the order of the program's layer ids.
    pub layers: Vec<LayerConfig>,
    /// The most positions that the cache holds.
    pub capacity: i32,
    /// Slots of the first allocation, doubled as needed up to `capacity`.
    pub min_chunk: i32,
    /// Storage of keys.
    pub k_format: KvFormat,
    /// Storage of values.
    pub v_format: KvFormat,
}

impl CacheConfig {
    /// Slots of the first allocation where nothing else is asked for.
    pub const DEFAULT_MIN_CHUNK: i32 = 256;

    /// A config of `n_layers` equal layers with float16 storage.
    pub fn uniform(n_layers: usize, n_kv_heads: i32, head_dim: i32, capacity: i32) -> Self {
        let layer = LayerConfig { n_kv_heads, k_head_dim: head_dim, v_head_dim: head_dim };
        Self {
            layers: vec![layer; n_layers],
            capacity,
            min_chunk: Self::DEFAULT_MIN_CHUNK,
            k_format: KvFormat::default(),
            v_format: KvFormat::default(),
        }
    }

    /// Refuses what cannot be.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument), naming the field.
    pub fn validate(&self) -> Result<()> {
        if self.layers.is_empty() {
            fail!(InvalidArgument, "a cache needs at least 1 layer");
        }
        if self.capacity < 1 {
            fail!(InvalidArgument, "capacity is {}, the least is 1", self.capacity);
        }
        if self.min_chunk < 1 {
            fail!(InvalidArgument, "min_chunk is {}, the least is 1", self.min_chunk);
        }
        for (id, layer) in self.layers.iter().enumerate() {
            for (name, value) in [
                ("n_kv_heads", layer.n_kv_heads),
                ("k_head_dim", layer.k_head_dim),
                ("v_head_dim", layer.v_head_dim),
            ] {
                if value < 1 {
                    fail!(InvalidArgument, "layer {id}: {name} is {value}, the least is 1");
                }
            }
        }
        if self.checked_bytes(self.capacity).is_none() {
            fail!(
                InvalidArgument,
                "a capacity of {} needs more than 2^64 bytes for these layers",
                self.capacity
            );
        }
        Ok(())
    }

    /// Slots allocated for `length` positions: `min_chunk` doubled until they
    /// fit, at most `capacity`; none for none.
    pub fn slots_for(&self, length: i32) -> i32 {
        if length <= 0 {
            return 0;
        }
        let mut slots = i64::from(self.min_chunk);
        while slots < i64::from(length) {
            slots *= 2;
        }
        // `capacity` is an i32, so the least of the two is one as well.
        slots.min(i64::from(self.capacity)) as i32
    }

    /// Bytes of `slots` slots of every layer, keys and values; at most
    /// `u64::MAX`, which no config that is valid reaches.
    pub fn bytes(&self, slots: i32) -> u64 {
        self.checked_bytes(slots).unwrap_or(u64::MAX)
    }

    fn checked_bytes(&self, slots: i32) -> Option<u64> {
        self.layers.iter().try_fold(0u64, |total, layer| {
            let row = self.k_format.row_bytes(layer.k_head_dim as usize)
                + self.v_format.row_bytes(layer.v_head_dim as usize);
            // A row is at most 8 times 2^31 bytes, heads at most 2^31.
            let slot = (row as u64).checked_mul(layer.n_kv_heads as u64)?;
            total.checked_add(slot.checked_mul(slots.max(0) as u64)?)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_double_from_the_first_chunk_to_capacity() {
        let config = CacheConfig { min_chunk: 16, ..CacheConfig::uniform(1, 1, 1, 100) };
        let slots: Vec<i32> =
            [0, 1, 16, 17, 33, 64, 65, 100].map(|length| config.slots_for(length)).to_vec();
        assert_eq!(slots, [0, 16, 16, 32, 64, 64, 100, 100]);
    }

    #[test]
    fn slots_do_not_overflow() {
        let config = CacheConfig { min_chunk: i32::MAX, ..CacheConfig::uniform(1, 1, 1, i32::MAX) };
        assert_eq!(config.slots_for(i32::MAX), i32::MAX);
    }

    #[test]
    fn bytes_count_keys_and_values_of_every_layer() {
        let mut config = CacheConfig::uniform(2, 3, 64, 10);
        config.k_format = KvFormat::F32;
        assert_eq!(config.bytes(10), 2 * 10 * 3 * (64 * 4 + 64 * 2));
    }

    #[test]
    fn what_no_memory_can_hold_is_refused() {
        let mut config = CacheConfig::uniform(1, i32::MAX, i32::MAX, i32::MAX);
        assert!(config.validate().unwrap_err().message().contains("2^64"));
        config.capacity = 1;
        assert!(config.validate().is_ok());
    }

    #[test]
    fn what_cannot_be_is_named() {
        let good = CacheConfig::uniform(1, 1, 1, 1);
        assert!(good.validate().is_ok());
        let message = |config: CacheConfig| config.validate().unwrap_err().to_string();
        assert_eq!(
            message(CacheConfig { capacity: 0, ..good.clone() }),
            "capacity is 0, the least is 1"
        );
        assert_eq!(
            message(CacheConfig { min_chunk: -1, ..good.clone() }),
            "min_chunk is -1, the least is 1"
        );
        assert_eq!(
            message(CacheConfig { layers: vec![], ..good.clone() }),
            "a cache needs at least 1 layer"
        );
        let mut layers = CacheConfig::uniform(2, 1, 1, 1);
        layers.layers[1].v_head_dim = 0;
        assert_eq!(message(layers), "layer 1: v_head_dim is 0, the least is 1");
    }
}
