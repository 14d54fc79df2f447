//! What a step attends to, and the one place that calls MLX's attention.

use mlx_rs::fast::{scaled_dot_product_attention, ScaledDotProductAttentionMask};
use mlx_rs::{Array, Dtype};

use crate::error::Result;
use crate::mlx::cast;

/// Which keys a query sees.
#[derive(Debug, Clone)]
pub enum Mask {
    /// All of them: the read is the selection.
    None,
    /// Query `i` of `T` sees all keys but the last `T - 1 - i`: the queries are
    /// the tail of the keys.
    Causal,
}

/// A layer's keys and values as a step reads them, and how to mask them.
#[derive(Debug, Clone)]
pub struct AttendSpec {
    /// `[1, n_kv_heads, L, k_head_dim]`, in storage dtype.
    pub k: Array,
    /// `[1, n_kv_heads, L, v_head_dim]`, in storage dtype.
    pub v: Array,
    /// The mask.
    pub mask: Mask,
}

/// Attention of `q`, `[1, n_heads, T, k_head_dim]`, over `spec`.
///
/// Returns `[1, n_heads, T, v_head_dim]` in `out_dtype`, or in the dtype of `q`
/// where there is none. Storage in another dtype than `q` is read as `q`'s.
///
/// # Errors
/// [`Mlx`](crate::Status::Mlx) where the shapes do not fit each other.
pub fn attend(q: &Array, spec: &AttendSpec, scale: f32, out_dtype: Option<Dtype>) -> Result<Array> {
    let k = cast(&spec.k, q.dtype())?;
    let v = cast(&spec.v, q.dtype())?;
    let mask = match spec.mask {
        Mask::None => None,
        Mask::Causal => Some(ScaledDotProductAttentionMask::Causal),
    };
    let out = scaled_dot_product_attention(q, k, v, scale, mask, None)?;
    match out_dtype {
        Some(dtype) => cast(&out, dtype),
        None => Ok(out),
    }
}
