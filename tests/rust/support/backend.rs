//! The trait that the campaign of the caches needs of a backend.

use etkv_core::{KvFormat, Result, Spec, Store};

use crate::oracle::{Row, Rows};

/// The tensor of a backend's programs.
pub type Tensor<B> = <<B as Backend>::Store as Store>::Tensor;

/// A backend's storage, and as much of a program as the tests need.
pub trait Backend: 'static {
    type Store: Store;

    /// Whether a failing op fails when it is called, and not when its outputs are computed.
    const COMPUTES_AT_ONCE: bool = false;

    /// Whether its caches can be saved.
    const SAVES: bool = true;

    /// Runs `work` where tensors may be made and computed.
    fn run<T>(work: impl FnOnce() -> T) -> T;

    /// Returns `[1, heads, rows, dim]`, as a program passes it.
    fn tensor(rows: &[Row]) -> Tensor<Self>
    where
        Self: Sized;

    /// Returns the rows of a computed tensor.
    fn rows(tensor: &Tensor<Self>) -> Rows
    where
        Self: Sized;

    /// Returns the rows of what a step reads: `rows[slot][head]`.
    fn view(view: &<Self::Store as Store>::View) -> Rows
    where
        Self: Sized;

    /// Returns the attention of `q` over what a step reads.
    fn attend(q: &Tensor<Self>, spec: &Spec<Self::Store>, scale: f32) -> Result<Tensor<Self>>
    where
        Self: Sized;

    /// Returns rows as a quantized format rounds them.
    fn quantized(rows: &[Row], format: KvFormat) -> Rows;

    /// Returns a tensor like `x` that fails when it is computed, or the error itself with
    /// [`COMPUTES_AT_ONCE`](Self::COMPUTES_AT_ONCE).
    fn failing(x: &Tensor<Self>) -> Result<Tensor<Self>>
    where
        Self: Sized;

    /// Returns rows as `format` rounds them.
    fn stored(rows: &[Row], format: KvFormat) -> Rows {
        if format.is_float() || rows.is_empty() {
            crate::oracle::rounded(rows, format)
        } else {
            Self::quantized(rows, format)
        }
    }
}
