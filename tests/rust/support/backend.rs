//! What the campaign of the caches asks of a backend.

use etkv_core::{KvFormat, Result, Spec, Store};

use crate::oracle::{Row, Rows};

/// What a backend's programs compute with.
pub type Tensor<B> = <<B as Backend>::Store as Store>::Tensor;

/// A backend's storage, and as much of a program as the tests need.
pub trait Backend: 'static {
    type Store: Store;

    /// Runs `work` where tensors may be made and computed.
    fn run<T>(work: impl FnOnce() -> T) -> T;

    /// `[1, heads, rows, dim]`, as a program passes it.
    fn tensor(rows: &[Row]) -> Tensor<Self>
    where
        Self: Sized;

    /// The rows of a tensor that was computed.
    fn rows(tensor: &Tensor<Self>) -> Rows
    where
        Self: Sized;

    /// Attention of `q` over what a step reads.
    fn attend(q: &Tensor<Self>, spec: &Spec<Self::Store>, scale: f32) -> Result<Tensor<Self>>
    where
        Self: Sized;

    /// What storing rows in a format that quantizes leaves of them.
    fn quantized(rows: &[Row], format: KvFormat) -> Rows;

    /// A tensor like `x` that fails when it is computed.
    fn failing(x: &Tensor<Self>) -> Result<Tensor<Self>>
    where
        Self: Sized;

    /// What storing rows in `format` leaves of them.
    fn stored(rows: &[Row], format: KvFormat) -> Rows {
        if format.is_float() || rows.is_empty() {
            crate::oracle::rounded(rows, format)
        } else {
            Self::quantized(rows, format)
        }
    }
}
