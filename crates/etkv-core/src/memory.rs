//! Bytes of a cache's buffers.

/// The bytes of one buffer, or of several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bytes {
    /// The bytes that are allocated.
    pub allocated: u64,
    /// The allocated bytes that positions use.
    pub used: u64,
}

/// The bytes of one layer's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerMemory {
    /// The buffer of the keys.
    pub k: Bytes,
    /// The buffer of the values.
    pub v: Bytes,
}

impl std::ops::Add for Bytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            allocated: self.allocated.saturating_add(other.allocated),
            used: self.used.saturating_add(other.used),
        }
    }
}

/// The bytes of one recurrent layer's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RecurrentMemory {
    /// The buffers of the rows.
    pub rows: Bytes,
    /// The buffer of the anchors.
    pub anchors: Bytes,
}

/// The bytes of a cache's buffers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Memory {
    /// The bytes that are allocated now.
    pub allocated: u64,
    /// The allocated bytes that positions use.
    pub used: u64,
    /// The bytes of the prefix's rows that the cache reads. Other caches may read them too. The other fields do not
    /// include them.
    pub shared: u64,
    /// The maximum number of bytes that the cache can ever allocate.
    pub at_capacity: u64,
    /// The bytes of each attention layer.
    pub layers: Vec<LayerMemory>,
    /// The bytes of each recurrent layer.
    pub recurrent_layers: Vec<RecurrentMemory>,
}

impl Memory {
    /// Returns the sums over these layers.
    pub fn of(
        layers: Vec<LayerMemory>,
        recurrent_layers: Vec<RecurrentMemory>,
        at_capacity: u64,
    ) -> Self {
        let attention = layers.iter().map(|layer| layer.k + layer.v);
        let recurrent = recurrent_layers.iter().map(|layer| layer.rows + layer.anchors);
        let Bytes { allocated, used } =
            attention.chain(recurrent).fold(Bytes::default(), |total, layer| total + layer);
        Self { allocated, used, shared: 0, at_capacity, layers, recurrent_layers }
    }
}
