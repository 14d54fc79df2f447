//! The keys and values that a step attends to. Only this module calls MLX's attention, or the kernel instead.

mod fused;

use mlx_rs::fast::{scaled_dot_product_attention, ScaledDotProductAttentionMask};
use mlx_rs::ops::{arange, concatenate, select, softmax_axis};
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use crate::error::{fail, Result};
use crate::kernels;
use crate::mlx::{self, cast, slice_axis};
use crate::store::KvView;

/// The keys that a query sees; an explicit mask is a boolean array.
pub type Mask = etkv_core::Mask<Array>;

/// A layer's keys and values as a step reads them, and how to mask them.
pub type AttendSpec = etkv_core::AttendSpec<KvView, Array>;

/// Computes the attention of `q`, `[1, n_heads, T, k_head_dim]`, over `spec`.
///
/// Returns `[1, n_heads, T, v_head_dim]` in `out_dtype`, or in the dtype of `q` if that is `None`.
///
/// Rows in the dtype of `q` are read in place. For packed rows and rows in another dtype, few queries read
/// the stored rows, or a block of them at a time. For many queries the keys and values of one KV head are
/// unpacked at a time; on a GPU, those of as many heads as fit 256 MiB.
///
/// # Errors
/// [`Backend`](crate::Status::Backend) if the shapes do not match.
pub fn attend(q: &Array, spec: &AttendSpec, scale: f32, out_dtype: Option<Dtype>) -> Result<Array> {
    let out = match (spec.k.as_dtype(q.dtype()), spec.v.as_dtype(q.dtype())) {
        (Some(k), Some(v)) => by_rows(q, k, v, &spec.mask, scale)?,
        _ => {
            let rows = group_of(q, spec)?.saturating_mul(q.dim(2));
            let dtype = dtype_of_products(q)?;
            let packed = spec.k.packed_is_better(rows, dtype)?;
            attend_stored(q, spec, scale, packed && spec.v.packed_is_better(rows, dtype)?)?
        }
    };
    cast(&out, out_dtype.unwrap_or(q.dtype()))
}

/// [`attend`] over the stored rows (`packed`) or over unpacked rows. The benchmark uses it to
/// choose between them.
#[doc(hidden)]
pub fn attend_stored(q: &Array, spec: &AttendSpec, scale: f32, packed: bool) -> Result<Array> {
    let group = group_of(q, spec)?;
    if packed {
        by_products(q, spec, group, scale)
    } else {
        by_heads(q, spec, group, scale)
    }
}

/// Computes attention over rows in the dtype of `q` with the kernel for several queries, even for a single
/// one, or with MLX. Returns `None` if there is no kernel. The benchmark compares them.
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
        by_mlx(q, k, v, mask, scale).map(Some)
    }
}

/// The most bytes of keys and values that are unpacked at a time on a GPU, in float32.
const MAX_UNPACKED: u64 = 256 << 20;

/// Computes attention over rows in the dtype of `q`, and returns that dtype.
fn by_rows(q: &Array, k: &Array, v: &Array, mask: &Mask, scale: f32) -> Result<Array> {
    match kernels::several_queries(q, k, v, mask, scale)? {
        Some(out) => Ok(out),
        None => by_mlx(q, k, v, mask, scale),
    }
}

/// Calls MLX's own attention. Returns the dtype of `q`.
fn by_mlx(q: &Array, k: &Array, v: &Array, mask: &Mask, scale: f32) -> Result<Array> {
    let dtype = fused::dtype_for(q, k, mask)?;
    if dtype != q.dtype() {
        let [wide_q, k, v] = [cast(q, dtype)?, cast(k, dtype)?, cast(v, dtype)?];
        return cast(&by_mlx(&wide_q, &k, &v, mask, scale)?, q.dtype());
    }
    let mask = match mask {
        Mask::None => None,
        Mask::Causal => Some(ScaledDotProductAttentionMask::Causal),
        Mask::Explicit(mask) => Some(ScaledDotProductAttentionMask::Array(mask)),
    };
    Ok(scaled_dot_product_attention(q, k, v, scale, mask, None)?)
}

/// Returns the query heads of one KV head.
fn group_of(q: &Array, spec: &AttendSpec) -> Result<i32> {
    let heads = spec.k.n_kv_heads();
    if q.ndim() != 4 || heads <= 0 || q.dim(1) % heads != 0 || spec.v.n_kv_heads() != heads {
        fail!(
            Shape,
            "queries of shape {:?} do not fit keys of {heads} and values of {} heads",
            q.shape(),
            spec.v.n_kv_heads()
        );
    }
    Ok(q.dim(1) / heads)
}

/// Computes attention with the stored rows. The queries of a KV head are rows of one matrix, so nothing is
/// repeated.
fn by_products(q: &Array, spec: &AttendSpec, group: i32, scale: f32) -> Result<Array> {
    let (heads, t, n) = (spec.k.n_kv_heads(), q.dim(2), spec.k.len());
    let dtype = dtype_of_products(q)?;
    let rows = cast(q, dtype)?.multiply(Array::from_f32(scale).as_dtype(dtype)?)?;
    let rows = rows.reshape(&[1, heads, group * t, q.dim(3)])?;
    let scores = spec.k.scores(&rows)?;
    let scores = scores.reshape(&[1, heads, group, t, n])?;
    let scores = masked(&scores, &spec.mask)?;
    let p = softmax_axis(scores, -1, true)?;
    let p = p.reshape(&[1, heads, group * t, n])?;
    let out = spec.v.weighted(&cast(&p, dtype)?)?;
    Ok(out.reshape(&[1, heads * group, t, spec.v.head_dim()])?)
}

/// Returns the dtype in which queries multiply packed or unpacked rows. In half precision MLX's
/// packed products take ten times as long on the CPU, and its attention takes longer than in
/// float32.
fn dtype_of_products(q: &Array) -> Result<Dtype> {
    Ok(if mlx::on_gpu()? { q.dtype() } else { Dtype::Float32 })
}

/// Returns `scores`, `[1, n_kv_heads, group, T, L]`, with the smallest number for hidden keys, as MLX's own
/// attention does.
fn masked(scores: &Array, mask: &Mask) -> Result<Array> {
    let [heads, group, t, n] = [1, 2, 3, 4].map(|axis| scores.dim(axis));
    let seen = match mask {
        Mask::None => return Ok(scores.clone()),
        Mask::Causal => {
            let last = arange::<_, i32>(n - t, n, None)?.reshape(&[t, 1])?;
            arange::<_, i32>(0, n, None)?.reshape(&[1, n])?.le(last)?
        }
        // The heads are a separate axis, as in the scores; a mask without heads broadcasts.
        Mask::Explicit(mask) if mask.ndim() >= 3 && mask.dim(-3) != 1 => {
            mask.reshape(&[1, heads, group, mask.dim(-2), mask.dim(-1)])?
        }
        Mask::Explicit(mask) => mask.clone(),
    };
    let seen = match seen.ndim() {
        4 => seen.expand_dims(1)?,
        _ => seen,
    };
    let least = match scores.dtype() {
        Dtype::Float16 => -65504.0,
        // The largest bfloat16.
        Dtype::Bfloat16 => -3.389_531_4e38,
        _ => f32::MIN,
    };
    Ok(select(seen, scores, Array::from_f32(least).as_dtype(scores.dtype())?)?)
}

/// Calls MLX's attention for some KV heads at a time, and unpacks only these.
fn by_heads(q: &Array, spec: &AttendSpec, group: i32, scale: f32) -> Result<Array> {
    let q = cast(q, dtype_of_products(q)?)?;
    let heads = spec.k.n_kv_heads();
    let step = heads_at_a_time(spec)?;
    let mut outs: Vec<Array> = Vec::new();
    for first in (0..heads).step_by(step) {
        let last = heads.min(first.saturating_add(step as i32));
        let (from, to) = (first * group, last * group);
        let k = spec.k.heads(first, last)?.dequantized(q.dtype())?;
        let v = spec.v.heads(first, last)?.dequantized(q.dtype())?;
        let mask = match &spec.mask {
            Mask::Explicit(mask) if mask.ndim() >= 3 && mask.dim(-3) != 1 => {
                Mask::Explicit(slice_axis(mask, mask.ndim() - 3, from, to, 1)?)
            }
            mask => mask.clone(),
        };
        let out = by_rows(&slice_axis(&q, 1, from, to, 1)?, &k, &v, &mask, scale)?;
        if last - first < heads {
            // Evaluates now, because MLX would otherwise unpack every head before it attends to the first.
            eval([&out])?;
        }
        outs.push(out);
    }
    match outs.len() {
        1 => Ok(outs.swap_remove(0)),
        _ => Ok(concatenate(&outs, 1)?),
    }
}

/// Returns the number of KV heads whose rows are unpacked together: one on the CPU, where a single head is as
/// fast and takes less memory. On a GPU each call has a latency.
fn heads_at_a_time(spec: &AttendSpec) -> Result<usize> {
    if !mlx::on_gpu()? {
        return Ok(1);
    }
    let size = |n: i32| u64::from(n.unsigned_abs());
    let row = size(spec.k.head_dim()) + size(spec.v.head_dim());
    let head = size(spec.k.len()) * row * size_of::<f32>() as u64;
    Ok((MAX_UNPACKED / head.max(1)).clamp(1, size(spec.k.n_kv_heads()).max(1)) as usize)
}
