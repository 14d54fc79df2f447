//! Attention over rows in their storage format.
//!
//! A call is split into tasks (`plan`) of some query rows and some slots. A task processes its slots in tiles
//! of 64 (`task`): it computes scores, optionally bounds them by a softcap (`softcap`), updates an online
//! softmax, and adds weighted values (`kernels`, `softmax`). If several tasks share the slots of a row, their
//! partial results are merged at the end. Sinks are added there, since they have no slots. Kernels are
//! generic over vectors (`simd`) and formats (`decode`).

mod decode;
mod kernels;
mod mask;
mod plan;
mod softcap;
mod softmax;
#[doc(hidden)]
pub mod synthetic;
mod task;
mod tensor;
#[cfg(test)]
pub(crate) mod tests;
mod workspace;

use std::f32::consts::LOG2_E;

use etkv_core::{fail, Result, Scoring};

pub use mask::MaskRef;
pub use tensor::{Output, Queries, Shape};
pub use workspace::Workspace;

use crate::memory::pieces::{divide_for, Blocks};
use crate::parallel::{share, Parallel, Serial};
use crate::simd::{with_simd, Instructions, Simd};
use crate::store::view::View;
use decode::Encoding;
use plan::{Plan, Sizes};
use task::{Job, StoredRows};

/// Computes the attention of `queries`, `[n_heads, T, k_head_dim]`, over the keys `k` and the values `v`,
/// with weights `softmax(scale * q k^T)` over the slots that `mask` allows. Writes `[n_heads, T, v_head_dim]`
/// to `out`. `scoring` is a scale, or also has a softcap and sinks.
///
/// `n_heads` is a multiple of the KV heads. Keys and values may differ in format and head_dim. All sums are
/// in float32. The result does not depend on the number of threads. The result of a query that sees no slot
/// is zeros. Slots that no query sees are not read. A slot that only some queries of a step see must be
/// finite: the other queries multiply its values by 0, and 0 times NaN is NaN.
///
/// # Errors
/// [`Shape`](etkv_core::Status::Shape) if the shapes do not match,
/// [`InvalidArgument`](etkv_core::Status::InvalidArgument) if the mask has slots past the views or the
/// softcap is out of range, [`Unsupported`](etkv_core::Status::Unsupported) for a format that attention does
/// not read, and [`Backend`](etkv_core::Status::Backend) if memory is lacking. An error writes nothing.
#[allow(clippy::too_many_arguments)]
pub fn attend<'a>(
    workspace: &mut Workspace,
    parallel: &dyn Parallel,
    queries: &Queries,
    k: &View,
    v: &View,
    mask: MaskRef,
    scoring: impl Into<Scoring<'a, [f32]>>,
    out: &mut Output,
) -> Result<()> {
    let scoring = scoring.into();
    attend_with(Instructions::best(), workspace, parallel, queries, k, v, mask, scoring, out)
}

/// The same as [`attend`], with a given instruction set of this machine.
#[allow(clippy::too_many_arguments)]
fn attend_with(
    instructions: Instructions,
    workspace: &mut Workspace,
    parallel: &dyn Parallel,
    queries: &Queries,
    k: &View,
    v: &View,
    mask: MaskRef,
    scoring: Scoring<[f32]>,
    out: &mut Output,
) -> Result<()> {
    let vector_width = with_simd!(instructions, |S| S::WIDTH);
    let sizes = sizes(queries.shape(), k, v, out.shape(), vector_width)?;
    mask.check(sizes.n_tokens, sizes.n_slots)?;
    scoring.check()?;
    if let Some(sinks) = scoring.sinks.filter(|sinks| sinks.len() != queries.shape().n_heads) {
        fail!(
            Shape,
            "expected {} sinks, one per head, got {}",
            queries.shape().n_heads,
            sinks.len()
        );
    }
    let stored = [stored(k)?, stored(v)?];
    if sizes.rows() == 0 || sizes.n_kv_heads == 0 || sizes.v_dim == 0 {
        return Ok(());
    }
    // Less than about ten microseconds of work is not worth waking another thread.
    let work = sizes.n_kv_heads * sizes.n_slots * (sizes.k_dim + sizes.v_dim) * sizes.rows();
    let parallel = if work < 1 << 17 { &Serial } else { parallel };
    // The host may lock a mutex in this call, so it is called once.
    let available = parallel.threads();
    let plan = Plan::new(sizes, available);
    let threads = available.min(plan.n_tasks()).max(1);
    let (parts, blocks) = divide_for(&mut workspace.memory, plan, threads)?;
    let [k, v] = stored;
    let factor = scoring.scale * LOG2_E;
    // From here on, attention weights are computed as powers of 2 instead of e, so the scores are in units of
    // log 2.
    let softcap = scoring.softcap.map(|softcap| softcap * LOG2_E);
    let job = Job { plan, queries, k, v, mask, factor, softcap, sinks: scoring.sinks, out, parts };
    with_simd!(instructions, |S| run::<S>(&job, &blocks, parallel, threads));
    Ok(())
}

/// Runs the tasks of a call, and merges their partial results.
fn run<S: Simd>(job: &Job, blocks: &Blocks<Plan>, parallel: &dyn Parallel, threads: usize) {
    // SAFETY: only this thread uses the block.
    let scratch = |thread| unsafe { blocks.scratch(thread) }.numbered();
    share(parallel, threads, job.plan.n_tasks(), scratch, |scratch, i| {
        // SAFETY: the machine has the instructions, and tasks have different rows.
        unsafe { task::run::<S>(job, job.plan.task(i), scratch) };
    });
    let n_parts = job.plan.n_parts;
    if n_parts == 1 {
        return;
    }
    let work = job.plan.all_rows() * n_parts * job.plan.sizes.v_dim;
    let parallel = if work < 1 << 17 { &Serial } else { parallel };
    // Each row belongs to one task of part 0, so these tasks enumerate all rows.
    share(parallel, threads, job.plan.n_tasks() / n_parts, scratch, |scratch, i| {
        let task = job.plan.task(i * n_parts);
        for head in task.first_head..task.end_head {
            for row in 0..(task.end_token - task.first_token) * job.plan.sizes.group {
                // SAFETY: all tasks are done, and only this task uses the rows.
                unsafe { task::finish::<S>(job, task, head, row, scratch) };
            }
        }
    });
}

/// Checks that the shapes match. Returns the sizes.
fn sizes(queries: Shape, k: &View, v: &View, out: Shape, vector_width: usize) -> Result<Sizes> {
    let Shape { n_heads, n_tokens, head_dim, .. } = queries;
    let n_kv_heads = k.n_kv_heads;
    if v.n_kv_heads != n_kv_heads || v.n_slots != k.n_slots {
        fail!(
            Shape,
            "expected values of {n_kv_heads} heads and {} slots, like the keys, got {} heads and \
             {} slots",
            k.n_slots,
            v.n_kv_heads,
            v.n_slots
        );
    }
    if head_dim != k.head_dim || n_kv_heads == 0 || n_heads % n_kv_heads != 0 {
        fail!(
            Shape,
            "expected queries with a multiple of {n_kv_heads} heads and head_dim {}, got {n_heads} \
             heads and head_dim {head_dim}",
            k.head_dim
        );
    }
    let expected = [n_heads, n_tokens, v.head_dim];
    let found = [out.n_heads, out.n_tokens, out.head_dim];
    if found != expected {
        fail!(Shape, "expected an output of shape {expected:?}, got {found:?}");
    }
    if u32::try_from(k.n_slots).is_err() {
        fail!(Shape, "expected at most {} slots, got {}", u32::MAX, k.n_slots);
    }
    Ok(Sizes {
        n_kv_heads,
        group: n_heads / n_kv_heads,
        n_tokens,
        n_slots: k.n_slots,
        k_dim: k.head_dim,
        v_dim: v.head_dim,
        vector_width,
    })
}

/// Returns the addresses of the rows of a view.
fn stored(view: &View) -> Result<StoredRows> {
    let (encoding, n_planes) = Encoding::of(view.format)?;
    let mut stored = StoredRows {
        encoding,
        dim: view.head_dim,
        bytes: 0,
        first: [std::ptr::null(); 3],
        slot_strides: [0; 3],
        head_strides: [0; 3],
    };
    for p in 0..n_planes {
        let Some(plane) = &view.planes[p] else {
            fail!(Internal, "expected {n_planes} planes of {}, got {p}", view.format);
        };
        stored.first[p] = plane.memory.as_ptr().cast_const().wrapping_add(plane.offset);
        stored.slot_strides[p] = plane.slot_stride;
        stored.head_strides[p] = plane.head_stride;
        if p == 0 {
            stored.bytes = plane.head_stride;
        }
    }
    Ok(stored)
}
