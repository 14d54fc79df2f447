//! Attention of a step.

use etkv_core::{fail, Mask, Result, Scoring, Spec};

use crate::attention::{self, MaskRef, Output, Queries, Shape, Workspace};
use crate::parallel::Parallel;
use crate::store::CpuStore;
use crate::tensor::{Dtype, Tensor, Values};

/// Computes the attention of `q`, `[1, n_heads, T, k_head_dim]`, over the keys and values that a step reads.
/// `scoring` is a scale, or a [`Scoring`] with a softcap and sinks.
///
/// Returns `[1, n_heads, T, v_head_dim]` in `out_dtype`, or in the dtype of `q` if it is `None`.
///
/// # Errors
/// [`Shape`](etkv_core::Status::Shape) for queries whose batch is not 1, and the errors of
/// [`attention::attend`].
pub fn attend<'a>(
    q: &Tensor,
    spec: &Spec<CpuStore>,
    scoring: impl Into<Scoring<'a, [f32]>>,
    out_dtype: Option<Dtype>,
    workspace: &mut Workspace,
    parallel: &dyn Parallel,
) -> Result<Tensor> {
    let [_, heads, n, _] = *q.shape();
    let shape = [1, heads, n, spec.v.head_dim() as i32];
    let size = heads as usize * n as usize * spec.v.head_dim();
    let mut values = Values::zeros(out_dtype.unwrap_or(q.dtype()), size);
    let (start, dtype) = values.as_mut_ptr();
    // SAFETY: `values` has the elements, and they are contiguous.
    unsafe { attend_into(q, spec, scoring.into(), start, dtype, workspace, parallel)? };
    Tensor::new(shape, values)
}

/// The same as [`attend`], but writes the output to `start`.
///
/// # Safety
/// `start` must point to `n_heads * T * v_head_dim` elements of `dtype`, aligned to their size. Nothing else
/// may access them during the call.
pub(crate) unsafe fn attend_into(
    q: &Tensor,
    spec: &Spec<CpuStore>,
    scoring: Scoring<[f32]>,
    start: *mut u8,
    dtype: Dtype,
    workspace: &mut Workspace,
    parallel: &dyn Parallel,
) -> Result<()> {
    let mask = match &spec.mask {
        Mask::None => MaskRef::None,
        Mask::Causal => MaskRef::Causal,
        Mask::Explicit(mask) => {
            let (runs, ends) = mask.all();
            MaskRef::Runs { runs, ends }
        }
    };
    let [batch, heads, n, _] = *q.shape();
    if batch != 1 {
        fail!(Shape, "expected queries of shape [1, n_heads, T, k_head_dim], got {:?}", q.shape());
    }
    let shape = Shape::contiguous(heads as usize, n as usize, spec.v.head_dim());
    // SAFETY: the caller upholds the contract.
    let mut out = unsafe { Output::new(start, dtype, shape) };
    with_queries(q, |queries| {
        let (k, v) = (&spec.k, &spec.v);
        attention::attend(workspace, parallel, queries, k, v, mask, scoring, &mut out)
    })
}

/// Passes the first batch of a tensor as queries to `work`. Copies it if its rows are not contiguous.
fn with_queries<T>(q: &Tensor, work: impl FnOnce(&Queries) -> T) -> T {
    let [_, heads, n, dim] = q.shape().map(|size| size as usize);
    let mut shape = Shape::contiguous(heads, n, dim);
    let &[_, head_stride, token_stride, _] = q.strides();
    match (usize::try_from(head_stride), usize::try_from(token_stride)) {
        (Ok(head_stride), Ok(token_stride)) if q.has_runs() => {
            (shape.head_stride, shape.token_stride) = (head_stride, token_stride);
            // SAFETY: the constructors of the tensor ensure that the elements exist.
            work(&unsafe { Queries::new(q.start(), q.dtype(), shape) })
        }
        _ => {
            let values = q.to_f32();
            // SAFETY: `values` has the elements of the shape, and they are contiguous.
            work(&unsafe { Queries::new(values.as_ptr().cast(), Dtype::F32, shape) })
        }
    }
}

#[cfg(test)]
mod tests {
    use etkv_core::{AttendSpec, KvFormat, Status};

    use super::*;
    use crate::attention::synthetic::{view, Random};
    use crate::parallel::Serial;
    use crate::refused::refused;

    #[test]
    fn queries_of_another_batch_are_refused() {
        let rows = || view(KvFormat::F32, 1, 16, 4, &mut Random::new(1)).unwrap();
        let spec = AttendSpec { k: rows(), v: rows(), mask: Mask::None };
        let attend = |batch: i32| {
            let q = Tensor::new([batch, 1, 1, 16], vec![0.5f32; 16 * batch as usize]).unwrap();
            super::attend(&q, &spec, 0.25, None, &mut Workspace::new(), &Serial)
        };
        assert_eq!(attend(1).unwrap().shape(), &[1, 1, 1, 16]);
        for batch in [0, 2] {
            refused(attend(batch), Status::Shape, &format!("got [{batch}, 1, 1, 16]"));
        }
    }
}
