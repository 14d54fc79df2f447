//! Attention over the keys and values of a step. Only this module calls MLX's attention or the CUDA kernel.

mod composed;
mod fused;

use mlx_rs::fast::{scaled_dot_product_attention, ScaledDotProductAttentionMask};
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use crate::error::{fail, Result};
use crate::kernels;
use crate::mlx::{self, cast, joined, slice_axis};
use crate::store::KvView;

/// The keys that a query sees. An explicit mask is a boolean array.
pub type Mask = etkv_core::Mask<Array>;

/// How products of queries and keys become attention weights.
pub type Scoring<'a> = etkv_core::Scoring<'a, Array>;

/// A layer's keys and values as a step reads them, and their mask.
pub type AttendSpec = etkv_core::AttendSpec<KvView, Array>;

/// Computes the attention of `q`, `[1, n_heads, T, k_head_dim]`, over `spec`. `scoring` is a scale, with or without a
/// softcap and sinks.
///
/// Returns `[1, n_heads, T, v_head_dim]` in `out_dtype`, or in the dtype of `q` if that is `None`.
///
/// Rows in the dtype of `q` are read in place. For packed rows and rows in another dtype, a call with few queries
/// reads the stored rows, all at once or block by block. A call with many queries unpacks the keys and values of one
/// KV head after the other. On a GPU it unpacks as many heads together as fit 256 MiB. With a softcap, it computes
/// the scores of as many queries together as fit 256 MiB.
///
/// If the values are the first elements of the keys, they are not copied: the attention weights multiply whole keys,
/// and the first elements of the results are returned.
///
/// # Errors
/// [`Shape`](crate::Status::Shape) or [`Backend`](crate::Status::Backend) if the shapes do not match, and
/// [`InvalidArgument`](crate::Status::InvalidArgument) for a softcap that is out of range.
pub fn attend<'a>(
    q: &Array,
    spec: &AttendSpec,
    scoring: impl Into<Scoring<'a>>,
    out_dtype: Option<Dtype>,
) -> Result<Array> {
    let scoring = scoring.into();
    check(q, scoring)?;
    if spec.v.is_in_keys() {
        let dim = spec.v.head_dim();
        let whole =
            AttendSpec { k: spec.k.clone(), v: spec.k.as_values(), mask: spec.mask.clone() };
        let out = attend_checked(q, &whole, scoring, out_dtype)?;
        return slice_axis(&out, 3, 0, dim, 1);
    }
    attend_checked(q, spec, scoring, out_dtype)
}

fn attend_checked(
    q: &Array,
    spec: &AttendSpec,
    scoring: Scoring,
    out_dtype: Option<Dtype>,
) -> Result<Array> {
    let out = match (spec.k.as_dtype(q.dtype()), spec.v.as_dtype(q.dtype())) {
        (Some(k), Some(v)) => by_rows(q, k, v, &spec.mask, scoring)?,
        _ => {
            let rows = group_of(q, spec)?.saturating_mul(q.dim(2));
            let dtype = dtype_of_products(q)?;
            let packed = spec.k.packed_is_better(rows, dtype)?;
            attend_stored(q, spec, scoring, packed && spec.v.packed_is_better(rows, dtype)?)?
        }
    };
    cast(&out, out_dtype.unwrap_or(q.dtype()))
}

/// Checks that there is a sink for each head of `q`, and that the softcap is in range.
fn check(q: &Array, scoring: Scoring) -> Result<()> {
    scoring.check()?;
    let heads = q.shape().get(1).copied().unwrap_or_default();
    match scoring.sinks {
        Some(sinks) if sinks.shape() != [heads] => {
            fail!(
                Shape,
                "expected sinks of shape [{heads}], one for each head, got {:?}",
                sinks.shape()
            )
        }
        _ => Ok(()),
    }
}

/// Computes [`attend`] over stored rows if `packed`, else over unpacked rows. The benchmark measures both, to find out
/// when `attend` should unpack.
#[doc(hidden)]
pub fn attend_stored<'a>(
    q: &Array,
    spec: &AttendSpec,
    scoring: impl Into<Scoring<'a>>,
    packed: bool,
) -> Result<Array> {
    let (group, scoring) = (group_of(q, spec)?, scoring.into());
    if packed {
        composed::by_products(q, spec, scoring)
    } else {
        by_heads(q, spec, group, scoring)
    }
}

/// Computes attention over rows in the dtype of `q`. With `by_kernel`, uses the kernel for several queries, even for a
/// single query, and returns `None` if the kernel does not support the call. Otherwise uses MLX. The benchmark compares
/// the two.
#[doc(hidden)]
pub fn attend_rows(
    [q, k, v]: [&Array; 3],
    mask: &Mask,
    scale: f32,
    by_kernel: bool,
) -> Result<Option<Array>> {
    if by_kernel {
        kernels::attend(q, k, v, mask, scale)
    } else {
        by_mlx(q, k, v, mask, scale.into()).map(Some)
    }
}

/// The maximum number of bytes of keys and values, in float32, that are unpacked together on a GPU.
const MAX_UNPACKED: u64 = 256 << 20;

/// Computes attention over rows in the dtype of `q`, and returns that dtype.
fn by_rows(q: &Array, k: &Array, v: &Array, mask: &Mask, scoring: Scoring) -> Result<Array> {
    if scoring.softcap.is_some() {
        return composed::over_rows(q, k, v, mask, scoring);
    }
    // The kernel does not support sinks.
    let by_kernel = match scoring.sinks {
        None => kernels::several_queries(q, k, v, mask, scoring.scale)?,
        Some(_) => None,
    };
    match by_kernel {
        Some(out) => Ok(out),
        None => by_mlx(q, k, v, mask, scoring),
    }
}

/// Calls MLX's own attention, which supports sinks but no softcap. Returns the dtype of `q`.
fn by_mlx(q: &Array, k: &Array, v: &Array, mask: &Mask, scoring: Scoring) -> Result<Array> {
    let dtype = fused::dtype_for(q, k, mask)?;
    if dtype != q.dtype() {
        let [wide_q, k, v] = [cast(q, dtype)?, cast(k, dtype)?, cast(v, dtype)?];
        return cast(&by_mlx(&wide_q, &k, &v, mask, scoring)?, q.dtype());
    }
    let mask = match mask {
        Mask::None => None,
        Mask::Causal => Some(ScaledDotProductAttentionMask::Causal),
        Mask::Explicit(mask) => Some(ScaledDotProductAttentionMask::Array(mask)),
    };
    // MLX refuses sinks of a wider dtype than the queries.
    let sinks = scoring.sinks.map(|sinks| cast(sinks, dtype)).transpose()?;
    Ok(scaled_dot_product_attention(q, k, v, scoring.scale, mask, sinks.as_ref())?)
}

/// Returns the number of query heads for each KV head.
fn group_of(q: &Array, spec: &AttendSpec) -> Result<i32> {
    let heads = spec.k.n_kv_heads();
    if q.ndim() != 4 || heads <= 0 || q.dim(1) % heads != 0 || spec.v.n_kv_heads() != heads {
        fail!(
            Shape,
            "cannot attend with queries of shape {:?} to keys of {heads} and values of {} heads",
            q.shape(),
            spec.v.n_kv_heads()
        );
    }
    Ok(q.dim(1) / heads)
}

/// Returns the dtype in which queries multiply packed or unpacked rows. In half precision MLX's packed products take
/// ten times as long on the CPU, and MLX's attention takes longer than in float32.
fn dtype_of_products(q: &Array) -> Result<Dtype> {
    Ok(if mlx::on_gpu()? { q.dtype() } else { Dtype::Float32 })
}

/// Calls MLX's attention for a few KV heads at a time, and unpacks only the rows of these heads.
fn by_heads(q: &Array, spec: &AttendSpec, group: i32, scoring: Scoring) -> Result<Array> {
    let q = cast(q, dtype_of_products(q)?)?;
    let heads = spec.k.n_kv_heads();
    let step = heads_at_a_time(spec)?;
    let mut outs: Vec<Array> = Vec::new();
    for first in (0..heads).step_by(step) {
        let last = heads.min(first.saturating_add(step as i32));
        let (from, to) = (first * group, last * group);
        let k = spec.k.heads(first, last)?.dequantized(q.dtype())?;
        let v = match spec.v.is_in_keys() {
            true => k.clone(),
            false => spec.v.heads(first, last)?.dequantized(q.dtype())?,
        };
        let mask = match &spec.mask {
            Mask::Explicit(mask) if mask.ndim() >= 3 && mask.dim(-3) != 1 => {
                Mask::Explicit(slice_axis(mask, mask.ndim() - 3, from, to, 1)?)
            }
            mask => mask.clone(),
        };
        let sinks = scoring.sinks.map(|sinks| slice_axis(sinks, 0, from, to, 1)).transpose()?;
        let scoring = Scoring { sinks: sinks.as_ref(), ..scoring };
        let out = by_rows(&slice_axis(&q, 1, from, to, 1)?, &k, &v, &mask, scoring)?;
        if last - first < heads {
            // Evaluates now, because MLX would otherwise unpack every head before it attends to the first.
            eval([&out])?;
        }
        outs.push(out);
    }
    joined(&outs, 1)
}

/// Returns the number of KV heads whose rows are unpacked together: one on the CPU, where more heads are no faster
/// and take more memory. On a GPU, more heads save calls, each of which has a latency.
fn heads_at_a_time(spec: &AttendSpec) -> Result<usize> {
    if !mlx::on_gpu()? {
        return Ok(1);
    }
    let size = |n: i32| u64::from(n.unsigned_abs());
    let row = size(spec.k.head_dim()) + size(spec.v.head_dim());
    let head = size(spec.k.len()) * row * size_of::<f32>() as u64;
    Ok((MAX_UNPACKED / head.max(1)).clamp(1, size(spec.k.n_kv_heads()).max(1)) as usize)
}
