//! The data of a scan that all its tasks use.

use etkv_core::bookkeeping::RecurrentPlan;
use serde::Deserialize;

use super::check::Stored;
use super::layout::{Shared, Sizes};
use crate::tensor::{Dtype, Tensor};

/// A linear recurrence. Each head has a state of `k_dim` times `v_dim` elements. A token adds an update to
/// the state, and reads it with its query.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Scan {
    /// The number of heads of queries and keys.
    pub k_heads: usize,
    /// The number of heads of values, a multiple of `k_heads`.
    pub heads: usize,
    /// The elements of a key.
    pub k_dim: usize,
    /// The elements of a value.
    pub v_dim: usize,
    /// Whether each channel of a key has a separate decay.
    pub channel_decay: bool,
    /// The factor by which outputs are multiplied.
    pub scale: f32,
}

/// The inputs of a step of `T` tokens. Their dtypes may differ.
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

/// A call's data for its tasks.
pub(super) struct Job<'a> {
    pub sizes: Sizes,
    pub plan: &'a RecurrentPlan,
    pub inputs: &'a ScanInputs<'a>,
    /// The factor by which queries are multiplied.
    pub scale: f32,
    pub keys: Stored,
    pub updates: Stored,
    pub anchors: Stored,
    /// For each fold, the index of its anchor in the workspace, if it is kept.
    pub places: &'a [Option<u32>],
    pub shared: Shared,
    /// `[heads, T, v_dim]`.
    pub out: *mut u8,
    pub dtype: Dtype,
}

// SAFETY: each task reads and writes different heads and columns. Inputs are not written.
unsafe impl Sync for Job<'_> {}
