//! Causal depthwise convolutions.

// An index selects a register. Iterators would hide this.
#![allow(clippy::needless_range_loop)]

use etkv_core::bookkeeping::{RecurrentPlan, RowSource};
use etkv_core::{fail, RecurrentRows, RecurrentSpec, Result};
use serde::Deserialize;

use super::check::{axis, check_rows, check_shape, Stored};
use super::exp::exp;
use super::load::load_run;
use super::scan::owned;
use super::Workspace;
use crate::memory::pieces::{divide_for, Layout, Pieces};
use crate::parallel::{share, Parallel, Serial};
use crate::simd::{with_simd, Instructions};
use crate::simd::{Kernel, Simd};
use crate::store::view::View;
use crate::tensor::{Dtype, Tensor, Values};

/// The channels of a task, in whole vectors.
const CHANNELS: usize = 256;

/// If lanes are tokens: the number of channels whose columns are written together. The numbers of these
/// channels for one token fill a cache line.
const LINE: usize = 16;

/// The activation function of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
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
    /// The columns of the tokens, `[1, channels, T, 1]`.
    pub x: &'a Tensor,
    /// `[1, 1, channels, width]`. The last weight of a channel is that of the token itself.
    pub weight: &'a Tensor,
    /// `[1, 1, 1, channels]`.
    pub bias: Option<&'a Tensor>,
    /// The function that is applied to the sums.
    pub activation: Activation,
}

/// Computes a causal convolution of each channel over the tokens of a step and the columns before them.
/// Columns before position 0 are zero.
///
/// Returns the outputs, `[1, channels, T, 1]` in `out_dtype`, or in the dtype of `x` if it is `None`, and the
/// columns that the plan stores, `[1, 1, n, channels]`. Sums are in float32, in the order of columns,
/// followed by the bias. The results depend neither on the number of threads nor on the division of the text
/// into steps.
///
/// # Errors
/// [`Shape`](etkv_core::Status::Shape) if shapes do not match, [`Internal`](etkv_core::Status::Internal) for
/// a plan with invalid indices, and [`Backend`](etkv_core::Status::Backend) if memory is lacking.
pub fn convolve(
    inputs: &ConvolveInputs,
    spec: &RecurrentSpec<View>,
    out_dtype: Option<Dtype>,
    workspace: &mut Workspace,
    parallel: &dyn Parallel,
) -> Result<(Tensor, RecurrentRows<Tensor>)> {
    let shape = *inputs.x.shape();
    let [_, channels, n_tokens, _] = shape.map(|size| size as usize);
    check_shape(inputs.x, "columns", [1, channels, n_tokens, 1])?;
    let size = channels * n_tokens;
    let mut values = Values::zeros(out_dtype.unwrap_or(inputs.x.dtype()), size);
    let (start, dtype) = values.as_mut_ptr();
    // SAFETY: `values` has the elements, and they are contiguous. Rows in the workspace are copied while it
    // is borrowed.
    let rows = unsafe { convolve_into(inputs, spec, start, dtype, workspace, parallel)? };
    Ok((Tensor::new(shape, values)?, owned(rows)?))
}

/// The same as [`convolve`], but writes the output to `start`, and returns columns in the workspace.
///
/// # Errors
/// The errors of [`convolve`]. The output is then not written.
///
/// # Safety
/// `start` must point to `channels * T` elements of `dtype`, aligned to their size. Nothing else may access
/// them during the call. The returned tensor must be dropped before the workspace is used again or dropped.
pub unsafe fn convolve_into(
    inputs: &ConvolveInputs,
    spec: &RecurrentSpec<View>,
    start: *mut u8,
    dtype: Dtype,
    workspace: &mut Workspace,
    parallel: &dyn Parallel,
) -> Result<RecurrentRows<Tensor>> {
    let best = Instructions::best();
    // SAFETY: the caller upholds the contract, and the machine has the instructions.
    unsafe { convolve_with(best, inputs, spec, start, dtype, workspace, parallel) }
}

/// The same as [`convolve_into`], with a given instruction set of this machine.
///
/// # Safety
/// The same as for [`convolve_into`].
pub(super) unsafe fn convolve_with(
    instructions: Instructions,
    inputs: &ConvolveInputs,
    spec: &RecurrentSpec<View>,
    start: *mut u8,
    dtype: Dtype,
    workspace: &mut Workspace,
    parallel: &dyn Parallel,
) -> Result<RecurrentRows<Tensor>> {
    let plan = &*spec.plan;
    let [_, channels, n_tokens, _] = inputs.x.shape().map(|size| size as usize);
    let width = inputs.weight.shape()[3] as usize;
    check_shape(inputs.x, "columns", [1, channels, n_tokens, 1])?;
    check_shape(inputs.weight, "weights", [1, 1, channels, width])?;
    if let Some(bias) = inputs.bias {
        check_shape(bias, "bias", [1, 1, 1, channels])?;
    }
    let too_wide = plan.chains.iter().find(|chain| {
        chain.rows.len() < (width.max(1) - 1).min(usize::try_from(chain.position).unwrap_or(0))
    });
    if let Some(chain) = too_wide {
        fail!(
            Shape,
            "a convolution of width {width} reads {} columns before position {}, the cache has {}: it was created for \
             a narrower one",
            width - 1,
            chain.position,
            chain.rows.len()
        );
    }
    if channels == 0 || width == 0 {
        fail!(Shape, "expected at least 1 channel and width 1, got {channels} and {width}");
    }
    let stored = Stored::of(spec.rows[0].as_ref(), "columns", 1, channels)?;
    check_rows(plan, n_tokens, &[stored])?;
    let work = channels.saturating_mul(n_tokens).saturating_mul(width);
    let parallel = if work < 1 << 15 { &Serial } else { parallel };
    let sizes = Sizes { channels, n_tokens, width, n_stored: plan.stored.len() };
    let n_tasks = channels.div_ceil(CHANNELS);
    let threads = parallel.threads().min(n_tasks).max(1);
    let (columns, blocks) = divide_for(&mut workspace.memory, sizes, threads)?;
    let job = Job { sizes, plan, inputs, stored, columns, out: start, dtype };
    if n_tokens > 0 {
        // SAFETY: only this thread uses the block.
        let scratch = |thread| unsafe { blocks.scratch(thread) };
        share(parallel, threads, n_tasks, scratch, |scratch, i| {
            // SAFETY: the shapes and the plan were checked, the machine has the instructions, and each task
            // runs once.
            with_simd!(instructions, |S| unsafe { job.run::<S>(i * CHANNELS, *scratch) });
        });
    }
    let shape = [1, 1, axis(plan.stored.len())?, axis(channels)?];
    let strides = [0, 0, channels as isize, 1];
    // SAFETY: the workspace has the columns, and the caller ensures that it outlives them.
    let rows = unsafe { Tensor::borrowed(columns.cast(), Dtype::F32, shape, strides)? };
    Ok(RecurrentRows { rows: [Some(rows), None], anchors: None })
}

#[derive(Debug, Clone, Copy)]
struct Sizes {
    channels: usize,
    n_tokens: usize,
    width: usize,
    n_stored: usize,
}

impl Sizes {
    /// Returns whether lanes are tokens. This suits the inputs of programs, in which the columns of a channel
    /// are contiguous. In short steps, lanes are channels instead.
    fn by_channel(&self) -> bool {
        self.n_tokens >= 16
    }
}

/// The scratch memory of one thread.
#[derive(Debug, Clone, Copy)]
struct Scratch {
    /// The step's columns: `[T, CHANNELS]`, or `[LINE, T]` if lanes are tokens.
    columns: *mut f32,
    /// The `width - 1` columns before a chain and those of the chain, in the same layout.
    chain: *mut f32,
    /// `[width, CHANNELS]`, or the weights of one channel.
    weights: *mut f32,
    /// `[CHANNELS]`.
    bias: *mut f32,
    /// The outputs of a token, or of a channel.
    out: *mut f32,
}

impl Layout for Sizes {
    /// The columns that are stored, `[n_stored, channels]`.
    type Shared = *mut f32;
    type Scratch = Scratch;

    fn shared(&self, pieces: &mut Pieces) -> *mut f32 {
        pieces.take(&[self.n_stored, self.channels])
    }

    fn scratch(&self, pieces: &mut Pieces) -> Scratch {
        let lanes = if self.by_channel() { 1 } else { CHANNELS };
        // Sizes are rounded up, because kernels read and write whole vectors.
        Scratch {
            columns: pieces.take(&[self.n_tokens, lanes.max(LINE)]),
            chain: pieces.take(&[self.n_tokens + self.width + 15, lanes]),
            weights: pieces.take(&[self.width, lanes]),
            bias: pieces.take(&[CHANNELS]),
            out: pieces.take(&[self.n_tokens.max(CHANNELS) + 15]),
        }
    }
}

struct Job<'a> {
    sizes: Sizes,
    plan: &'a RecurrentPlan,
    inputs: &'a ConvolveInputs<'a>,
    stored: Stored,
    /// `[n_stored, channels]`.
    columns: *mut f32,
    /// `[channels, T]`.
    out: *mut u8,
    dtype: Dtype,
}

// SAFETY: tasks write different channels.
unsafe impl Sync for Job<'_> {}

impl Job<'_> {
    /// Computes the channels from `first` on.
    ///
    /// # Safety
    /// The machine must have the instructions of `S`, and the job's pointers must be valid as their fields
    /// document. No other thread may compute these channels or use the scratch memory.
    unsafe fn run<S: Simd>(&self, first: usize, scratch: Scratch) {
        let n = CHANNELS.min(self.sizes.channels - first);
        // SAFETY: the caller upholds the contract.
        unsafe {
            if let Some(bias) = self.inputs.bias {
                let out = std::slice::from_raw_parts_mut(scratch.bias, n);
                load_run(bias, [0, 0, 0, first], 3, out);
            }
            if !self.sizes.by_channel() {
                return self.lanes::<S, false>(first, n, scratch);
            }
            for group in (0..n).step_by(LINE) {
                let end = n.min(group + LINE);
                for c in group..end {
                    let columns = scratch.columns.add((c - group) * self.sizes.n_tokens);
                    let scratch = Scratch { bias: scratch.bias.add(c), columns, ..scratch };
                    self.lanes::<S, true>(first + c, 1, scratch);
                }
                // The columns of consecutive tokens are far apart in memory, so a cache line of each is
                // written at a time.
                for (at, &token) in self.plan.stored.iter().enumerate() {
                    let to = self.columns.add(at * self.sizes.channels + first + group);
                    for c in 0..end - group {
                        *to.add(c) = *scratch.columns.add(c * self.sizes.n_tokens + token);
                    }
                }
            }
        }
    }

    /// Computes `n` channels. With `SPLAT`, it is one channel, and lanes are tokens. Otherwise lanes are
    /// channels.
    unsafe fn lanes<S: Simd, const SPLAT: bool>(&self, first: usize, n: usize, scratch: Scratch) {
        let Sizes { channels, n_tokens, width, .. } = self.sizes;
        let lanes = if SPLAT { 1 } else { CHANNELS };
        // SAFETY: the caller upholds the contract.
        unsafe {
            let row = |start: *mut f32, at: usize| {
                std::slice::from_raw_parts_mut(start.add(at * lanes), n)
            };
            for at in 0..width {
                load_run(self.inputs.weight, [0, 0, first, at], 2, row(scratch.weights, at));
            }
            if SPLAT {
                let out = std::slice::from_raw_parts_mut(scratch.columns, n_tokens);
                load_run(self.inputs.x, [0, first, 0, 0], 2, out);
            } else {
                for token in 0..n_tokens {
                    load_run(self.inputs.x, [0, first, token, 0], 1, row(scratch.columns, token));
                }
                for (at, &token) in self.plan.stored.iter().enumerate() {
                    let to = self.columns.add(at * channels + first);
                    std::ptr::copy_nonoverlapping(scratch.columns.add(token * lanes), to, n);
                }
            }
            for chain in &self.plan.chains {
                let before = chain.rows.len().min(width - 1);
                let none = width - 1 - before;
                scratch.chain.write_bytes(0, none * lanes);
                for (at, &source) in chain.rows[chain.rows.len() - before..].iter().enumerate() {
                    let from = match source {
                        RowSource::Slot(slot) => self.stored.row(slot, 0).add(first),
                        RowSource::Token(token) => scratch.columns.add(token * lanes),
                    };
                    row(scratch.chain, none + at)
                        .copy_from_slice(std::slice::from_raw_parts(from, n));
                }
                let (from, len) =
                    (scratch.columns.add(chain.tokens.start * lanes), chain.tokens.len());
                let to = scratch.chain.add((width - 1) * lanes);
                std::ptr::copy_nonoverlapping(from, to, len * lanes);
                let bias = self.inputs.bias.map_or(std::ptr::null(), |_| scratch.bias.cast_const());
                let taps = |data, count| Taps::<SPLAT> {
                    data,
                    weights: scratch.weights,
                    width,
                    bias,
                    silu: self.inputs.activation == Activation::Silu,
                    count,
                    out: scratch.out,
                };
                if SPLAT {
                    S::enter(taps(scratch.chain.cast_const(), len));
                    let out = std::slice::from_raw_parts(scratch.out, len);
                    self.write(out, first * n_tokens + chain.tokens.start, 1);
                    continue;
                }
                for (at, token) in chain.tokens.clone().enumerate() {
                    S::enter(taps(scratch.chain.add(at * lanes).cast_const(), n));
                    let out = std::slice::from_raw_parts(scratch.out, n);
                    self.write(out, first * n_tokens + token, n_tokens);
                }
            }
        }
    }

    /// Writes outputs from element `at` on, with a stride in elements.
    unsafe fn write(&self, values: &[f32], at: usize, stride: usize) {
        let size = self.dtype.size();
        let run = if stride == 1 { values.len().max(1) } else { 1 };
        for (i, values) in values.chunks(run).enumerate() {
            // SAFETY: the elements are those of the task.
            let out = unsafe {
                let start = self.out.add((at + i * stride) * size);
                std::slice::from_raw_parts_mut(start, values.len() * size)
            };
            self.dtype.store(values, out);
        }
    }
}

/// Computes the sums of a convolution.
struct Taps<const SPLAT: bool> {
    /// The numbers for the `width` taps, `count` for each, beginning with the earliest tap. Those of the next
    /// tap begin [`CHANNELS`] numbers later, or one number later with `SPLAT`.
    data: *const f32,
    /// A weight for each tap. Without `SPLAT`, each lane has a separate weight.
    weights: *const f32,
    width: usize,
    /// One number with `SPLAT`, or else one for each lane. May be null.
    bias: *const f32,
    silu: bool,
    /// The number of lanes. The memory has room for whole vectors.
    count: usize,
    out: *mut f32,
}

impl<const SPLAT: bool> Kernel for Taps<SPLAT> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let mut at = 0;
        // SAFETY: the fields document the validity of the pointers.
        unsafe {
            while at < self.count {
                let mut sum = S::splat(0.0);
                for tap in 0..self.width {
                    let (weight, data) = match SPLAT {
                        true => (S::splat(*self.weights.add(tap)), self.data.add(tap + at)),
                        false => (
                            S::load(self.weights.add(tap * CHANNELS + at)),
                            self.data.add(tap * CHANNELS + at),
                        ),
                    };
                    sum = S::fma(weight, S::load(data), sum);
                }
                if !self.bias.is_null() {
                    let bias = match SPLAT {
                        true => S::splat(*self.bias),
                        false => S::load(self.bias.add(at)),
                    };
                    sum = S::add(sum, bias);
                }
                if self.silu {
                    let (mut x, mut e) = ([0f32; 16], [0f32; 16]);
                    S::store(x.as_mut_ptr(), sum);
                    S::store(e.as_mut_ptr(), exp::<S>(S::sub(S::splat(0.0), sum)));
                    for i in 0..S::WIDTH {
                        x[i] /= 1.0 + e[i];
                    }
                    sum = S::load(x.as_ptr());
                }
                S::store(self.out.add(at), sum);
                at += S::WIDTH;
            }
        }
    }
}
