//! The sizes of recurrences.

/// The sizes of a recurrence.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub k_heads: i32,
    /// The number of value heads for each key head.
    pub share: i32,
    pub k_dim: i32,
    pub v_dim: i32,
    /// The number of decays of a head: 1, or `k_dim` if each channel has a decay.
    pub decays: i32,
    pub delta: bool,
}

impl Sizes {
    pub fn heads(&self) -> i32 {
        self.k_heads * self.share
    }

    /// Returns the number of elements of a row of updates.
    pub fn row(&self) -> i32 {
        self.v_dim.saturating_add(self.decays)
    }
}
