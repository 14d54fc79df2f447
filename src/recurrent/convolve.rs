//! Causal depthwise convolutions.

use etkv_core::bookkeeping::{RecurrentPlan, RowSource};
use mlx_rs::ops::{concatenate, sigmoid};
use mlx_rs::{Array, Dtype};

use super::rows::{check_plan, run, stored, stored_tokens, take};
use super::{check_shape, on_cuda, RecurrentRows, RecurrentSpec};
use crate::error::{fail, Result};
use crate::mlx::{cast, joined};

/// The function that is applied to the sums of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activation {
    /// Nothing.
    #[default]
    None,
    /// `x / (1 + exp(-x))`.
    Silu,
}

/// The inputs of a step of `T` tokens. Their dtypes may differ.
#[derive(Debug, Clone, Copy)]
pub struct ConvolveInputs<'a> {
    /// The columns of the tokens, `[1, channels, T]`.
    pub x: &'a Array,
    /// `[channels, width]`. The last weight of a channel multiplies the token's own column.
    pub weight: &'a Array,
    /// `[channels]`.
    pub bias: Option<&'a Array>,
    /// The function that is applied to the sums.
    pub activation: Activation,
}

/// Computes a convolution of each channel over the tokens of a step and the columns before them. Columns before
/// position 0 are zero.
///
/// Returns the outputs, `[1, channels, T]`, and the columns that the plan stores, `[1, 1, n, channels]`. The outputs
/// are in `out_dtype`, or in the dtype of `x` if `out_dtype` is `None`.
///
/// # Errors
/// [`Shape`](crate::Status::Shape) if shapes do not match, [`Internal`](crate::Status::Internal) if the plan refers
/// to tokens or slots that do not exist, and [`Backend`](crate::Status::Backend).
pub fn convolve(
    inputs: &ConvolveInputs,
    spec: &RecurrentSpec,
    out_dtype: Option<Dtype>,
) -> Result<(Array, RecurrentRows)> {
    let plan = &*spec.plan;
    check_plan(plan)?;
    let &[channels, width] = inputs.weight.shape() else {
        let shape = inputs.weight.shape();
        fail!(Shape, "expected weights of shape [channels, width], got {shape:?}");
    };
    if channels < 1 || width < 1 {
        fail!(Shape, "expected at least 1 channel and width 1, got {channels} and {width}");
    }
    let n_tokens = plan.n_tokens() as i32;
    check_shape(inputs.x, "columns", &[1, channels, n_tokens])?;
    if let Some(bias) = inputs.bias {
        check_shape(bias, "bias", &[channels])?;
    }
    let slots = stored(spec.rows[0].as_ref(), "columns", [1, channels])?;
    let out_dtype = out_dtype.unwrap_or(inputs.x.dtype());
    if let Some(computed) = on_cuda::convolve(inputs, slots, &spec.plan, out_dtype)? {
        return Ok(computed);
    }
    let slots = slots.map(|slots| slots.reshape(&[-1, channels])).transpose()?;
    let fresh = cast(inputs.x, Dtype::Float32)?.transpose_axes(&[0, 2, 1])?;
    let fresh = fresh.reshape(&[n_tokens, channels])?;
    // [width, channels]
    let weight = cast(inputs.weight, Dtype::Float32)?.transpose()?;
    let mut sums = match &plan.chains[..] {
        [_] => one_chain(plan, slots.as_ref(), &fresh, &weight)?,
        _ => by_window(plan, slots.as_ref(), &fresh, &weight)?,
    };
    if let Some(bias) = inputs.bias {
        sums = sums.add(cast(bias, Dtype::Float32)?)?;
    }
    if inputs.activation == Activation::Silu {
        sums = sums.multiply(sigmoid(&sums)?)?;
    }
    let out = sums.transpose()?.reshape(&[1, channels, n_tokens])?;
    let rows = take(&fresh, &stored_tokens(plan), 0)?.reshape(&[1, 1, -1, channels])?;
    let rows = RecurrentRows { rows: [Some(rows), None], anchors: None };
    Ok((cast(&out, out_dtype)?, rows))
}

/// Returns the sums `[T, channels]` of a single chain.
fn one_chain(
    plan: &RecurrentPlan,
    slots: Option<&Array>,
    fresh: &Array,
    weight: &Array,
) -> Result<Array> {
    let (n, width) = (plan.n_tokens(), weight.dim(0) as usize);
    let rows = &plan.chains[0].rows;
    let before = &rows[rows.len().saturating_sub(width - 1)..];
    let mut columns = Vec::new();
    if before.len() < width - 1 {
        columns.push(zeros(width - 1 - before.len(), fresh)?);
    }
    if !before.is_empty() {
        let before: Vec<i32> = before.iter().filter_map(slot_of).collect();
        columns.push(take(expect_slots(slots)?, &before, 0)?);
    }
    columns.push(fresh.clone());
    let columns = joined(&columns, 0)?;
    if n == 1 {
        return Ok(columns.multiply(weight)?.sum_axes(&[0], true)?);
    }
    let product = |tap: usize| -> Result<Array> {
        let weight = run(weight, 0, tap..tap + 1)?;
        Ok(run(&columns, 0, tap..tap + n)?.multiply(weight)?)
    };
    let mut sums = product(0)?;
    for tap in 1..width {
        sums = sums.add(product(tap)?)?;
    }
    Ok(sums)
}

/// Returns the sums `[T, channels]`. Gathers the columns that each token reads.
fn by_window(
    plan: &RecurrentPlan,
    slots: Option<&Array>,
    fresh: &Array,
    weight: &Array,
) -> Result<Array> {
    let (n, width) = (plan.n_tokens(), weight.dim(0) as usize);
    // Index 0 is a column of zeros. The tokens follow, and then the slots.
    let of_token = |token: usize| 1 + token as i32;
    let mut read: Vec<i32> = Vec::new();
    let mut windows: Vec<i32> = Vec::with_capacity(n * width);
    for chain in &plan.chains {
        let before = &chain.rows[chain.rows.len().saturating_sub(width - 1)..];
        let mut columns = vec![0; width - 1 - before.len()];
        for row in before {
            columns.push(match *row {
                RowSource::Token(token) => of_token(token),
                RowSource::Slot(slot) => {
                    read.push(slot);
                    of_token(n) + read.len() as i32 - 1
                }
            });
        }
        columns.extend(chain.tokens.clone().map(of_token));
        columns.windows(width).for_each(|window| windows.extend_from_slice(window));
    }
    let mut columns = vec![zeros(1, fresh)?, fresh.clone()];
    if !read.is_empty() {
        columns.push(take(expect_slots(slots)?, &read, 0)?);
    }
    let windows = Array::from_slice(&windows, &[n as i32, width as i32]);
    let columns = concatenate(&columns, 0)?.take_axis(windows, 0)?;
    Ok(columns.multiply(weight)?.sum_axes(&[1], false)?)
}

fn slot_of(row: &RowSource) -> Option<i32> {
    match *row {
        RowSource::Slot(slot) => Some(slot),
        RowSource::Token(_) => None,
    }
}

fn expect_slots(slots: Option<&Array>) -> Result<&Array> {
    match slots {
        Some(slots) => Ok(slots),
        None => fail!(Internal, "cannot read the slots of a step: there are no stored rows"),
    }
}

fn zeros(n: usize, like: &Array) -> Result<Array> {
    Ok(Array::zeros::<f32>(&[n as i32, like.dim(1)])?)
}
