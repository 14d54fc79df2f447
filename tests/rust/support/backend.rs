//! The interface to a backend that the campaign of the caches needs.

use etkv_core::{KvFormat, Result, Spec, Store};

use crate::oracle::{Row, Rows};

/// The tensor of a backend's programs.
pub type Tensor<B> = <<B as Backend>::Store as Store>::Tensor;

/// A backend's storage, and the parts of a program that the tests need.
pub trait Backend: 'static {
    type Store: Store;

    /// Whether a failing op fails when it is called, rather than when its outputs are computed.
    const COMPUTES_AT_ONCE: bool = false;

    /// How many times as long a generated operation takes as on the CPU. The tests run so many times fewer seeds.
    const COST: u64 = 1;

    /// Whether caches of this backend can be saved.
    const SAVES: bool = true;

    /// Runs `work` in a context where tensors may be created and computed.
    fn run<T>(work: impl FnOnce() -> T) -> T;

    /// Returns rows as a tensor that a program passes, `[1, heads, rows, dim]`.
    fn tensor(rows: &[Row]) -> Tensor<Self>
    where
        Self: Sized;

    /// Returns the rows of a computed tensor.
    fn rows(tensor: &Tensor<Self>) -> Rows
    where
        Self: Sized;

    /// Returns the rows of a view that a step reads: `rows[slot][head]`.
    fn view(view: &<Self::Store as Store>::View) -> Rows
    where
        Self: Sized;

    /// Returns the attention of `q` over the rows of `spec`.
    fn attend(q: &Tensor<Self>, spec: &Spec<Self::Store>, scale: f32) -> Result<Tensor<Self>>
    where
        Self: Sized;

    /// Returns rows after rounding in a quantized format.
    fn quantized(rows: &[Row], format: KvFormat) -> Rows;

    /// Returns a tensor like `x` whose computation fails. If [`COMPUTES_AT_ONCE`](Self::COMPUTES_AT_ONCE), returns
    /// the error instead.
    fn failing(x: &Tensor<Self>) -> Result<Tensor<Self>>
    where
        Self: Sized;

    /// Returns rows after rounding in `format`.
    fn stored(rows: &[Row], format: KvFormat) -> Rows {
        if format.is_float() || rows.is_empty() {
            crate::oracle::rounded(rows, format)
        } else {
            Self::quantized(rows, format)
        }
    }
}
