//! The keys, values and mask that the queries of a step attend to.

use std::ops::Range;

use crate::bookkeeping::{MaskPlan, Slots};

/// The keys that a query sees.
#[derive(Debug, Clone)]
pub enum Mask<M> {
    /// Every key that the step reads.
    None,
    /// Query `i` of `T` sees all keys but the last `T - 1 - i`: the last key belongs to the last query.
    Causal,
    /// The keys that are true in this boolean mask, `[T, L]` or a shape that broadcasts to `[1,
    /// n_heads, T, L]`.
    Explicit(M),
}

/// A layer's keys and values as a step reads them, and how to mask them.
#[derive(Debug, Clone)]
pub struct AttendSpec<V, M> {
    /// Keys, `[1, n_kv_heads, L, k_head_dim]`, as they are stored.
    pub k: V,
    /// Values, `[1, n_kv_heads, L, v_head_dim]`, as they are stored.
    pub v: V,
    /// The mask.
    pub mask: Mask<M>,
}

/// The slots for a layer's new rows, for a program that writes them into the store itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The slots of the rows, in the order of the step's tokens.
    pub write: Slots,
    /// The slots that attention reads, including those of the new rows.
    pub read: Range<i32>,
    /// Which of the read slots each query sees.
    pub mask: MaskPlan,
}
