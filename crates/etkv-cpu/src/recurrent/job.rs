//! A scan and its inputs, for its tasks.

use etkv_core::bookkeeping::RecurrentPlan;

use super::check::Stored;
use super::layout::{Shared, Sizes};
use crate::tensor::{Dtype, Tensor};

/// A linear recurrence: for each head a state of `k_dim` times `v_dim` elements, of which each token reads
/// its query's part and adds its own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scan {
    /// Heads of the queries and keys.
    pub k_heads: usize,
    /// Heads of the values, a multiple of `k_heads`.
    pub heads: usize,
    /// Elements of a key.
    pub k_dim: usize,
    /// Elements of a value.
    pub v_dim: usize,
    /// Whether each channel of a key has a decay of its own.
    pub channel_decay: bool,
    /// The factor of the outputs.
    pub scale: f32,
}

/// The inputs of a step of `T` tokens, each in a dtype of its own.
#[derive(Debug, Clone, Copy)]
pub struct ScanInputs<'a> {
    /// Queries, `[1, k_heads, T, k_dim]`.
    pub q: &'a Tensor,
    /// Keys, `[1, k_heads, T, k_dim]`.
    pub k: &'a Tensor,
    /// Values, `[1, heads, T, v_dim]`.
    pub v: &'a Tensor,
    /// Log decays, `[1, heads, T, 1]`, or `[1, heads, T, k_dim]` with a decay for each channel.
    pub g: &'a Tensor,
    /// Write strengths of the delta rule, `[1, heads, T, 1]`. Without them, the update of a token is its value.
    pub beta: Option<&'a Tensor>,
}

/// A call, for its tasks.
pub(super) struct Job<'a> {
    pub sizes: Sizes,
    pub plan: &'a RecurrentPlan,
    pub inputs: &'a ScanInputs<'a>,
    /// The factor of the queries.
    pub scale: f32,
    pub keys: Stored,
    pub updates: Stored,
    pub anchors: Stored,
    /// Where the anchor of each fold is kept, if it is.
    pub places: &'a [Option<u32>],
    pub shared: Shared,
    /// `[heads, T, v_dim]`.
    pub out: *mut u8,
    pub dtype: Dtype,
}

// SAFETY: tasks write to heads and columns of their own, and read those only. Inputs are not written.
unsafe impl Sync for Job<'_> {}
