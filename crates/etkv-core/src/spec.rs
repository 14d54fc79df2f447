//! The keys, values and mask that the queries of a step attend to.

use std::ops::Range;
use std::sync::Arc;

use crate::bookkeeping::{MaskPlan, RecurrentPlan, Slots};
use crate::error::{fail, Result};

/// The keys that a query sees.
#[derive(Debug, Clone)]
pub enum Mask<M> {
    /// Every key that the step reads.
    None,
    /// Query `i` of `T` sees all keys except the last `T - 1 - i`: the last key belongs to the last query.
    Causal,
    /// The keys for which this boolean mask is true. Its shape is `[T, L]`, or broadcasts to `[1, n_heads, T, L]`.
    Explicit(M),
}

/// A layer's keys and values as a step reads them, and their mask.
#[derive(Debug, Clone)]
pub struct AttendSpec<V, M> {
    /// Keys, `[1, n_kv_heads, L, k_head_dim]`, in the stored format.
    pub k: V,
    /// Values, `[1, n_kv_heads, L, v_head_dim]`, in the stored format.
    pub v: V,
    /// The mask.
    pub mask: Mask<M>,
}

/// How the products of queries and keys become attention weights.
///
/// The logits of a query are its products with the keys that it sees, times [`scale`](Self::scale), bounded by
/// [`softcap`](Self::softcap). The weights are their softmax, in which the head's sink is one more logit. A scale can
/// be converted to a scoring without the other two: `Scoring::from(0.125)`.
#[derive(Debug)]
pub struct Scoring<'a, T: ?Sized> {
    /// The factor that multiplies the products.
    pub scale: f32,
    /// The bound c of the logits: a scaled product x becomes `c * tanh(x / c)`. Sinks are not bounded.
    pub softcap: Option<f32>,
    /// An additional logit for each query head, `[n_heads]`, whose value vector is zero.
    pub sinks: Option<&'a T>,
}

impl<T: ?Sized> Clone for Scoring<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: ?Sized> Copy for Scoring<'_, T> {}

impl<T: ?Sized> From<f32> for Scoring<'_, T> {
    fn from(scale: f32) -> Self {
        Self { scale, softcap: None, sinks: None }
    }
}

impl<T: ?Sized> Scoring<'_, T> {
    /// The range of softcaps that backends can compute in float32.
    pub const SOFTCAPS: std::ops::RangeInclusive<f32> = 1e-30..=1e30;

    /// Returns whether there is neither a softcap nor sinks.
    pub fn is_plain(&self) -> bool {
        self.softcap.is_none() && self.sinks.is_none()
    }

    /// Checks the softcap.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a softcap outside of [`SOFTCAPS`](Self::SOFTCAPS).
    pub fn check(&self) -> Result<()> {
        match self.softcap {
            Some(softcap) if !Self::SOFTCAPS.contains(&softcap) => fail!(
                InvalidArgument,
                "expected a softcap from {:e} to {:e}, got {softcap}",
                Self::SOFTCAPS.start(),
                Self::SOFTCAPS.end()
            ),
            _ => Ok(()),
        }
    }
}

/// The slots for a layer's new rows, for a program that writes them into the store itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The slots of the rows, in the order of the step's tokens.
    pub write: Slots,
    /// The slots that attention reads, including those of the new rows.
    pub read: Range<i32>,
    /// The slots among `read` that each query sees.
    pub mask: MaskPlan,
}

/// The stored rows and anchors that a recurrent layer reads in a step, and the step's plan.
#[derive(Debug, Clone)]
pub struct RecurrentSpec<V> {
    /// The rows in the slots, starting at slot 0, as float32. A convolution has one buffer: input columns
    /// `[1, 1, L, channels]`. A recurrence has two: keys `[1, k_heads, L, k_dim]`, and updates with decays
    /// `[1, heads, L, v_dim + D]`, where `D` is `k_dim` if there is a decay for each channel, else 1. A decay is the
    /// sum of the log decays from the last anchor before the row up to the row.
    pub rows: [Option<V>; 2],
    /// The states in the slots, starting at slot 0, `[1, heads, A, k_dim * v_dim]` in float32, with `v_dim` as the
    /// fastest axis; `None` for a convolution, and if there are no states yet.
    pub anchors: Option<V>,
    /// The plan.
    pub plan: Arc<RecurrentPlan>,
}

/// The rows and anchors that a recurrent layer writes in a step, in the shapes of [`RecurrentSpec`].
#[derive(Debug, Clone)]
pub struct RecurrentRows<T> {
    /// The rows of the tokens in [`RecurrentPlan::stored`].
    pub rows: [Option<T>; 2],
    /// The anchors that have a slot, in the order of [`RecurrentPlan::folds`]; `None` if there are none.
    pub anchors: Option<T>,
}
