//! Rows of a step, by slots and by tokens.

use std::ops::Range;

use etkv_core::bookkeeping::{RecurrentPlan, RowSource};
use mlx_rs::{Array, Dtype};

use crate::error::{fail, Result};
use crate::mlx::slice_axis;
use crate::store::KvView;

/// Returns the stored rows of a view, `[1, heads, L, dim]`.
///
/// # Errors
/// [`Shape`](crate::Status::Shape), with the name `rows`, for another format or another shape.
pub fn stored<'a>(
    view: Option<&'a KvView>,
    rows: &str,
    [heads, dim]: [i32; 2],
) -> Result<Option<&'a Array>> {
    let Some(view) = view else { return Ok(None) };
    match view.as_dtype(Dtype::Float32) {
        Some(stored) if [view.n_kv_heads(), view.head_dim()] == [heads, dim] => Ok(Some(stored)),
        _ => fail!(
            Shape,
            "expected {rows} of {heads} heads with {dim} elements in f32, got {} heads with {} in {}",
            view.n_kv_heads(),
            view.head_dim(),
            view.format()
        ),
    }
}

/// Returns the rows with these indices along `axis`. Returns a view if the indices are consecutive.
///
/// # Errors
/// [`Internal`](crate::Status::Internal) for an index that does not exist, because MLX does not check indices.
pub fn take(array: &Array, indices: &[i32], axis: usize) -> Result<Array> {
    let n = array.shape().get(axis).copied().unwrap_or(0);
    if let Some(index) = indices.iter().find(|&index| !(0..n).contains(index)) {
        fail!(Internal, "cannot read row {index} of {n} rows");
    }
    let first = indices.first().copied().unwrap_or(0);
    if indices.iter().zip(first..).all(|(&index, expected)| index == expected) {
        let end = first + indices.len() as i32;
        return match (first, end) {
            (0, end) if end == n => Ok(array.clone()),
            (first, end) => slice_axis(array, axis, first, end, 1),
        };
    }
    let list = Array::from_slice(indices, &[indices.len() as i32]);
    Ok(array.take_axis(list, axis as i32)?)
}

/// Returns `take(array, range)`.
///
/// # Errors
/// Errors of [`slice_axis`].
pub fn run(array: &Array, axis: usize, range: Range<usize>) -> Result<Array> {
    let [start, end] = [range.start, range.end].map(|at| at as i32);
    match array.shape().get(axis) {
        Some(&n) if (start, end) == (0, n) => Ok(array.clone()),
        _ => slice_axis(array, axis, start, end, 1),
    }
}

/// Returns the indices of the tokens whose rows are stored.
pub fn stored_tokens(plan: &RecurrentPlan) -> Vec<i32> {
    plan.stored.iter().map(|&token| token as i32).collect()
}

/// Checks that the chains of a plan cover the plan's tokens in order, and that chains read only stored rows or
/// earlier tokens.
///
/// # Errors
/// [`Internal`](crate::Status::Internal) if a chain reads tokens that do not precede it.
pub fn check_plan(plan: &RecurrentPlan) -> Result<()> {
    let mut next = 0;
    for chain in &plan.chains {
        let follows = chain.tokens.start == next && chain.tokens.end > next && chain.position >= 0;
        let precede = |row: &RowSource| match *row {
            RowSource::Slot(_) => true,
            RowSource::Token(token) => token < chain.tokens.start,
        };
        if !follows || !chain.rows.iter().all(precede) {
            fail!(
                Internal,
                "tokens {:?} at position {} follow token {next} and rows {:?}",
                chain.tokens,
                chain.position,
                chain.rows
            );
        }
        next = chain.tokens.end;
    }
    if next == 0 {
        fail!(Internal, "the step has no tokens");
    }
    Ok(())
}
