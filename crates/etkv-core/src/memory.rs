//! Bytes of a cache's buffers.

/// Bytes of one buffer, or of several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bytes {
    /// Bytes allocated.
    pub allocated: u64,
    /// Those of the bytes that hold positions.
    pub used: u64,
}

/// Bytes of one layer's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerMemory {
    /// Its keys.
    pub k: Bytes,
    /// Its values.
    pub v: Bytes,
}

/// Bytes of a cache's buffers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Memory {
    /// Bytes allocated now.
    pub allocated: u64,
    /// Those of the bytes that hold positions.
    pub used: u64,
    /// Bytes of rows that the cache reads from a prefix, which other caches may read too. The other fields do
    /// not count them.
    pub shared: u64,
    /// The most bytes that the cache can ever hold.
    pub at_capacity: u64,
    /// The bytes of each layer.
    pub layers: Vec<LayerMemory>,
}

impl Memory {
    /// Sums `layers`.
    pub fn of(layers: Vec<LayerMemory>, at_capacity: u64) -> Self {
        let sum = |bytes: fn(&Bytes) -> u64| {
            layers.iter().fold(0u64, |total, layer| {
                total.saturating_add(bytes(&layer.k)).saturating_add(bytes(&layer.v))
            })
        };
        Self {
            allocated: sum(|bytes| bytes.allocated),
            used: sum(|bytes| bytes.used),
            shared: 0,
            at_capacity,
            layers,
        }
    }
}
