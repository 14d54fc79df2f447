//! Bytes of a cache's buffers.

/// Bytes of one buffer, or of several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bytes {
    /// Held.
    pub allocated: u64,
    /// Of these, in use by positions.
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
pub struct Memory {
    /// Held now.
    pub allocated: u64,
    /// Of these, in use by positions.
    pub used: u64,
    /// The most that it may come to hold.
    pub at_capacity: u64,
    /// The same layer by layer.
    pub layers: Vec<LayerMemory>,
}

impl Memory {
    /// The sum of `layers`.
    pub fn of(layers: Vec<LayerMemory>, at_capacity: u64) -> Self {
        let sum = |bytes: fn(&Bytes) -> u64| {
            layers.iter().fold(0u64, |total, layer| {
                total.saturating_add(bytes(&layer.k)).saturating_add(bytes(&layer.v))
            })
        };
        Self {
            allocated: sum(|bytes| bytes.allocated),
            used: sum(|bytes| bytes.used),
            at_capacity,
            layers,
        }
    }
}
