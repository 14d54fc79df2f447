//! The keys, values and mask that the queries of a step attend to.

/// The keys that a query sees.
#[derive(Debug, Clone)]
pub enum Mask<M> {
    /// Every key that is read.
    None,
    /// Query `i` of `T` sees all keys but the last `T - 1 - i`: the queries are
    /// the tail of the keys.
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
