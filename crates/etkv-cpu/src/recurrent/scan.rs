//! The scan of a step: its checks, its tasks, and the rows and anchors that are stored.

use etkv_core::bookkeeping::{AnchorSource, RecurrentPlan};
use etkv_core::{fail, RecurrentRows, RecurrentSpec, Result};

use super::check::{axis, check_anchors, check_rows, check_shape, Stored};
use super::job::{Job, Scan, ScanInputs};
use super::layout::{Shared, Sizes};
use super::load::load;
use super::task;
use super::Workspace;
use crate::memory::pieces::divide_for;
use crate::parallel::{share, Parallel, Serial};
use crate::simd::{with_simd, Instructions};
use crate::store::view::View;
use crate::tensor::{Dtype, Tensor, Values};

/// Computes a recurrence over the tokens of a step. Each head has a state `S`, and each token computes
///
/// ```text
/// u = beta (v - (exp(g) S)^T k)      or v, without beta
/// S = exp(g) S + k u^T
/// output = scale S^T q
/// ```
///
/// Returns the outputs, `[1, heads, T, v_dim]` in `out_dtype`, or in the dtype of `q` if it is `None`, and
/// the rows and anchors that the plan stores. All sums are in float32. The results depend neither on the
/// number of threads nor on the division of the text into steps. Log decays below -88 are replaced by -88,
/// which is a decay to zero.
///
/// # Errors
/// [`Shape`](etkv_core::Status::Shape) if shapes do not match, [`Internal`](etkv_core::Status::Internal) for
/// a plan with invalid indices, and [`Backend`](etkv_core::Status::Backend) if memory is lacking.
pub fn scan(
    scan: &Scan,
    inputs: &ScanInputs,
    spec: &RecurrentSpec<View>,
    out_dtype: Option<Dtype>,
    workspace: &mut Workspace,
    parallel: &dyn Parallel,
) -> Result<(Tensor, RecurrentRows<Tensor>)> {
    let n_tokens = spec.plan.n_tokens();
    let shape = [1, axis(scan.heads)?, axis(n_tokens)?, axis(scan.v_dim)?];
    // This is checked before memory for the outputs is allocated.
    check_shape(inputs.v, "values", [1, scan.heads, n_tokens, scan.v_dim])?;
    let size = scan.heads * n_tokens * scan.v_dim;
    let mut values = Values::zeros(out_dtype.unwrap_or(inputs.q.dtype()), size);
    let (start, dtype) = values.as_mut_ptr();
    // SAFETY: `values` has the elements, and they are contiguous. Rows in the workspace are copied while it
    // is borrowed.
    let rows = unsafe { scan_into(scan, inputs, spec, start, dtype, workspace, parallel)? };
    Ok((Tensor::new(shape, values)?, owned(rows)?))
}

/// Copies the rows to separate memory.
pub(super) fn owned(rows: RecurrentRows<Tensor>) -> Result<RecurrentRows<Tensor>> {
    let own = |tensor: Option<Tensor>| match tensor {
        Some(tensor) => Tensor::new(*tensor.shape(), tensor.to_f32()).map(Some),
        None => Ok(None),
    };
    let [a, b] = rows.rows;
    Ok(RecurrentRows { rows: [own(a)?, own(b)?], anchors: own(rows.anchors)? })
}

/// The same as [`scan`], but writes the output to `start`, and returns rows and anchors in the workspace.
///
/// # Errors
/// The errors of [`scan`]. The output may then be partly written.
///
/// # Safety
/// `start` must point to `heads * T * v_dim` elements of `dtype`, aligned to their size. Nothing else may
/// access them during the call. The returned tensors must be dropped before the workspace is used again or
/// dropped.
pub unsafe fn scan_into(
    scan: &Scan,
    inputs: &ScanInputs,
    spec: &RecurrentSpec<View>,
    start: *mut u8,
    dtype: Dtype,
    workspace: &mut Workspace,
    parallel: &dyn Parallel,
) -> Result<RecurrentRows<Tensor>> {
    let best = Instructions::best();
    // SAFETY: the caller upholds the contract, and the machine has the instructions.
    unsafe { scan_with(best, scan, inputs, spec, start, dtype, workspace, parallel) }
}

/// The same as [`scan_into`], with a given instruction set of this machine.
///
/// # Safety
/// The same as for [`scan_into`].
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn scan_with(
    instructions: Instructions,
    scan: &Scan,
    inputs: &ScanInputs,
    spec: &RecurrentSpec<View>,
    start: *mut u8,
    dtype: Dtype,
    workspace: &mut Workspace,
    parallel: &dyn Parallel,
) -> Result<RecurrentRows<Tensor>> {
    let plan = &*spec.plan;
    let n_tokens = check(scan, inputs, plan)?;
    let decay_dim = if scan.channel_decay { scan.k_dim } else { 1 };
    let row = scan.v_dim + decay_dim;
    let [keys, updates] = &spec.rows;
    let keys = Stored::of(keys.as_ref(), "keys", scan.k_heads, scan.k_dim)?;
    let updates = Stored::of(updates.as_ref(), "updates", scan.heads, row)?;
    let state = scan.k_dim.saturating_mul(scan.v_dim);
    let anchors = Stored::of(spec.anchors.as_ref(), "anchors", scan.heads, state)?;
    check_rows(plan, n_tokens, &[keys, updates])?;
    check_anchors(plan, &anchors)?;
    // Less than about ten microseconds of work is not worth waking another thread.
    let work = state.saturating_mul(scan.heads).saturating_mul(n_tokens);
    let parallel = if work < 1 << 16 { &Serial } else { parallel };
    // The host may lock a mutex in this call, so it is called once.
    let available = parallel.threads();
    let width = with_simd!(instructions, |S| <S as crate::simd::Simd>::WIDTH);
    let Workspace { memory, places } = workspace;
    let n_anchors = place_anchors(plan, places);
    let sizes = sizes(scan, inputs, plan, n_anchors, width, available);
    let n_tasks = sizes.heads * sizes.n_slices;
    let threads = available.min(n_tasks).max(1);
    let (shared, blocks) = divide_for(memory, sizes, threads)?;
    let job = Job {
        sizes,
        plan,
        inputs,
        scale: scan.scale,
        keys,
        updates,
        anchors,
        places,
        shared,
        out: start,
        dtype,
    };
    let loading = |head: usize| {
        // SAFETY: the shapes were checked, and each head is loaded once.
        unsafe { load(&job, head) };
    };
    match n_tokens {
        0 => {}
        1..16 => (0..sizes.heads).for_each(loading),
        _ => parallel.run(sizes.heads, &loading),
    }
    if n_tokens > 0 {
        // SAFETY: only this thread uses the block.
        let scratch = |thread| unsafe { blocks.scratch(thread) };
        share(parallel, threads, n_tasks, scratch, |scratch, i| {
            // SAFETY: the machine has the instructions, the plan was checked, and each task runs once.
            with_simd!(instructions, |S| unsafe { task::run::<S>(&job, i, scratch) });
        });
    }
    // SAFETY: the workspace has the rows, and the caller ensures that it outlives them.
    unsafe { rows(&sizes, plan, &shared) }
}

/// Checks the inputs. Returns the number of tokens.
fn check(scan: &Scan, inputs: &ScanInputs, plan: &RecurrentPlan) -> Result<usize> {
    let &Scan { k_heads, heads, k_dim, v_dim, channel_decay, .. } = scan;
    if k_heads == 0 || heads == 0 || heads % k_heads != 0 || k_dim == 0 || v_dim == 0 {
        fail!(
            Shape,
            "expected a multiple of the key heads and dims of at least 1, got {heads} heads, \
             {k_heads} key heads, dims {k_dim} and {v_dim}"
        );
    }
    let n = plan.n_tokens();
    check_shape(inputs.q, "queries", [1, k_heads, n, k_dim])?;
    check_shape(inputs.k, "keys", [1, k_heads, n, k_dim])?;
    check_shape(inputs.v, "values", [1, heads, n, v_dim])?;
    check_shape(inputs.g, "decays", [1, heads, n, if channel_decay { k_dim } else { 1 }])?;
    if let Some(beta) = inputs.beta {
        check_shape(beta, "write strengths", [1, heads, n, 1])?;
    }
    Ok(n)
}

/// Assigns an index in the workspace to the anchor of each fold, if the anchor is used later. Anchors that
/// are stored come first, in order. Anchors from which later chains start follow. Returns the number of
/// anchors.
fn place_anchors(plan: &RecurrentPlan, places: &mut Vec<Option<u32>>) -> usize {
    places.clear();
    places.resize(plan.folds.len(), None);
    let mut n = 0;
    let stored = places.iter_mut().zip(&plan.folds).filter(|(_, slot)| slot.is_some());
    for (place, _) in stored {
        *place = Some(n);
        n += 1;
    }
    for chain in &plan.chains {
        if let AnchorSource::Fold(fold) = chain.anchor {
            if places[fold].is_none() {
                places[fold] = Some(n);
                n += 1;
            }
        }
    }
    n as usize
}

fn sizes(
    scan: &Scan,
    inputs: &ScanInputs,
    plan: &RecurrentPlan,
    n_anchors: usize,
    width: usize,
    threads: usize,
) -> Sizes {
    let v_padded = scan.v_dim.next_multiple_of(width);
    // With two tasks for each thread, other load on the machine delays the call less. Parts of a head are not
    // small, because each part repeats the products of keys.
    let parts = match scan.v_dim == v_padded {
        true => (2 * threads).div_ceil(scan.heads).min(v_padded / width / 2).max(1),
        false => 1,
    };
    let slice = v_padded.div_ceil(width).div_ceil(parts) * width;
    let stored = &plan.stored;
    let run =
        stored.last().zip(stored.first()).is_none_or(|(last, first)| last - first < stored.len());
    Sizes {
        k_heads: scan.k_heads,
        heads: scan.heads,
        k_dim: scan.k_dim,
        v_dim: scan.v_dim,
        k_padded: scan.k_dim.next_multiple_of(width),
        v_padded,
        channel_decay: scan.channel_decay,
        delta: inputs.beta.is_some(),
        n_tokens: plan.n_tokens(),
        n_anchors,
        n_gathered: if run { 0 } else { stored.len() },
        n_slices: v_padded.div_ceil(slice),
        slice,
    }
}

/// Returns the rows and anchors that are stored.
///
/// # Safety
/// The workspace must have the rows until they are dropped.
unsafe fn rows(
    sizes: &Sizes,
    plan: &RecurrentPlan,
    shared: &Shared,
) -> Result<RecurrentRows<Tensor>> {
    let first = plan.stored.first().copied().unwrap_or(0);
    let (k_stride, v_stride) = (sizes.k_padded, sizes.update_stride());
    let buffers = [
        (shared.keys, shared.gathered_keys, sizes.k_heads, sizes.k_dim, k_stride),
        (
            shared.updates,
            shared.gathered_updates,
            sizes.heads,
            sizes.v_dim + sizes.decay_dim(),
            v_stride,
        ),
    ];
    let mut rows = [None, None];
    for (tensor, (computed, gathered, heads, dim, stride)) in rows.iter_mut().zip(buffers) {
        let (mut start, mut strides) =
            (computed.wrapping_add(first * stride), [sizes.n_tokens * stride, stride]);
        if sizes.n_gathered > 0 {
            (start, strides) = (gathered, [dim, heads * dim]);
            let places =
                plan.stored.iter().flat_map(|&token| (0..heads).map(move |head| (token, head)));
            for (i, (token, head)) in places.enumerate() {
                let from = (head * sizes.n_tokens + token) * stride;
                // SAFETY: the tokens are those of this step, and there is room for those that are stored.
                unsafe {
                    std::ptr::copy_nonoverlapping(computed.add(from), gathered.add(i * dim), dim)
                };
            }
        }
        let shape = [1, axis(heads)?, axis(plan.stored.len())?, axis(dim)?];
        let strides = [0, strides[0] as isize, strides[1] as isize, 1];
        // SAFETY: the caller upholds the contract.
        *tensor = Some(unsafe { Tensor::borrowed(start.cast(), Dtype::F32, shape, strides)? });
    }
    let n_stored = plan.folds.iter().flatten().count();
    let mut anchors = None;
    if n_stored > 0 {
        let state = sizes.k_dim * sizes.v_dim;
        let shape = [1, axis(sizes.heads)?, axis(n_stored)?, axis(state)?];
        let strides = [0, state as isize, (sizes.heads * state) as isize, 1];
        // SAFETY: the caller upholds the contract.
        anchors =
            Some(unsafe { Tensor::borrowed(shared.anchors.cast(), Dtype::F32, shape, strides)? });
    }
    Ok(RecurrentRows { rows, anchors })
}
