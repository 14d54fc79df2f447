//! Attention composed of MLX operations: a product, a softmax, a product. It multiplies rows in their stored format,
//! and supports softcaps.

use mlx_rs::ops::{arange, matmul, select, sigmoid, softmax_axis, tanh};
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::{dtype_of_products, AttendSpec, Mask, Scoring};
use crate::error::Result;
use crate::mlx::{cast, joined, slice_axis};

/// The maximum number of bytes of float32 scores that [`over_rows`] keeps in memory.
const MAX_SCORES: u64 = 256 << 20;

/// Computes attention with the stored rows.
pub fn by_products(q: &Array, spec: &AttendSpec, scoring: Scoring) -> Result<Array> {
    let keys = [spec.k.n_kv_heads(), spec.k.len()];
    let scores = |rows: &Array| spec.k.scores(rows);
    composed(q, keys, &spec.mask, scoring, scores, |p| spec.v.weighted(p))
}

/// Computes attention to the `n` keys of `heads` heads. The queries of a KV head are rows of one matrix, so nothing is
/// repeated. `scores` multiplies these rows with all keys. `weighted` multiplies the attention weights with all values.
fn composed(
    q: &Array,
    [heads, n]: [i32; 2],
    mask: &Mask,
    scoring: Scoring,
    scores: impl FnOnce(&Array) -> Result<Array>,
    weighted: impl FnOnce(&Array) -> Result<Array>,
) -> Result<Array> {
    let (n_heads, t) = (q.dim(1), q.dim(2));
    let group = n_heads / heads.max(1);
    let rows = scaled(q, scoring.scale)?.reshape(&[1, heads, group * t, q.dim(3)])?;
    let scores = scores(&rows)?.reshape(&[1, heads, group, t, n])?;
    let Weights { p, key_share } = weigh(scores, mask, scoring)?;
    let p = p.reshape(&[1, heads, group * t, n])?;
    let out = weighted(&cast(&p, rows.dtype())?)?;
    let out = out.reshape(&[1, n_heads, t, out.dim(3)])?;
    Ok(match key_share {
        Some(key_share) => out.multiply(key_share.reshape(&[1, n_heads, t, 1])?)?,
        None => out,
    })
}

/// Computes attention over rows in the dtype of `q`, and returns that dtype. Computes blocks of queries whose scores
/// fit [`MAX_SCORES`].
pub fn over_rows(q: &Array, k: &Array, v: &Array, mask: &Mask, scoring: Scoring) -> Result<Array> {
    over_rows_within(MAX_SCORES, q, k, v, mask, scoring)
}

pub(super) fn over_rows_within(
    max_scores: u64,
    q: &Array,
    k: &Array,
    v: &Array,
    mask: &Mask,
    scoring: Scoring,
) -> Result<Array> {
    let size = |n: i32| u64::from(n.unsigned_abs());
    let (t, n) = (q.dim(2), k.dim(2));
    let of_query = size(q.dim(1)) * size(n) * size_of::<f32>() as u64;
    let step = (max_scores / of_query.max(1)).clamp(1, size(t).max(1)) as i32;
    let dtype = dtype_of_products(q)?;
    let [k, v] = [cast(k, dtype)?, cast(v, dtype)?];
    let mut outs: Vec<Array> = Vec::new();
    for first in (0..t).step_by(step as usize) {
        let last = t.min(first.saturating_add(step));
        // A causal query sees no keys after its own position, so a block of queries needs only the keys up to the
        // position of its last query.
        let (keys, mask) = match mask {
            Mask::Causal => ((n - (t - last)).max(1), Mask::Causal),
            Mask::Explicit(mask) if mask.ndim() >= 2 && mask.dim(-2) == t => {
                let mask = slice_axis(mask, mask.ndim() - 2, first, last, 1)?;
                (n, Mask::Explicit(mask))
            }
            mask => (n, mask.clone()),
        };
        let q = slice_axis(q, 2, first, last, 1)?;
        let [k, v] = [slice_axis(&k, 2, 0, keys, 1)?, slice_axis(&v, 2, 0, keys, 1)?];
        let out = block(&q, &k, &v, &mask, scoring)?;
        if last - first < t {
            // Evaluates now, because MLX would otherwise hold the scores of all blocks.
            eval([&out])?;
        }
        outs.push(out);
    }
    cast(&joined(&outs, 2)?, q.dtype())
}

/// Computes the attention of `q` over rows in the dtype of products.
fn block(q: &Array, k: &Array, v: &Array, mask: &Mask, scoring: Scoring) -> Result<Array> {
    let scores = |rows: &Array| Ok(matmul(rows, k.transpose_axes(&[0, 1, 3, 2])?)?);
    composed(q, [k.dim(1), k.dim(2)], mask, scoring, scores, |p| Ok(matmul(p, v)?))
}

/// Returns queries times the scale, in the dtype of products.
fn scaled(q: &Array, scale: f32) -> Result<Array> {
    let dtype = dtype_of_products(q)?;
    Ok(cast(q, dtype)?.multiply(Array::from_f32(scale).as_dtype(dtype)?)?)
}

/// Attention weights.
struct Weights {
    /// The softmax of the scores without the sinks, `[1, n_kv_heads, group, T, L]`.
    p: Array,
    /// If there are sinks, the share of each row's weight that is left for the keys, `[1, n_kv_heads, group, T, 1]`
    /// in float32.
    key_share: Option<Array>,
}

/// Computes the attention weights from scores, `[1, n_kv_heads, group, T, L]`.
fn weigh(scores: Array, mask: &Mask, scoring: Scoring) -> Result<Weights> {
    if scoring.is_plain() {
        let p = softmax_axis(masked(&scores, mask)?, -1, true)?;
        return Ok(Weights { p, key_share: None });
    }
    let (heads, group) = (scores.dim(1), scores.dim(2));
    let mut logits = cast(&scores, Dtype::Float32)?;
    if let Some(softcap) = scoring.softcap {
        let bounded = tanh(logits.multiply(Array::from_f32(1.0 / softcap))?)?;
        logits = bounded.multiply(Array::from_f32(softcap))?;
    }
    let logits = masked(&logits, mask)?;
    let p = softmax_axis(&logits, -1, true)?;
    let key_share = match scoring.sinks {
        Some(sinks) => {
            let sinks = cast(sinks, Dtype::Float32)?.reshape(&[1, heads, group, 1, 1])?;
            // The share of the keys: their sum of e^score, divided by that sum plus e^sink.
            Some(sigmoid(logits.logsumexp_axes(&[-1], true)?.subtract(sinks)?)?)
        }
        None => None,
    };
    Ok(Weights { p, key_share })
}

/// Returns `scores`, `[1, n_kv_heads, group, T, L]`, with the lowest finite value for hidden keys, as in MLX's own
/// attention.
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
        // The lowest finite bfloat16.
        Dtype::Bfloat16 => -3.389_531_4e38,
        _ => f32::MIN,
    };
    Ok(select(seen, scores, Array::from_f32(least).as_dtype(scores.dtype())?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mlx::run;

    /// Numbers from -1 to 1.
    fn rows(seed: i32, shape: &[i32]) -> Array {
        let n: i32 = shape.iter().product();
        let number = |i: i32| f64::from(i * 37 + seed * 11).sin() as f32;
        Array::from_slice(&(0..n).map(number).collect::<Vec<_>>(), shape)
    }

    #[test]
    fn blocks_of_queries_join() {
        run(|| {
            let (t, n) = (23, 40);
            let q = rows(1, &[1, 4, t, 32]);
            let [k, v] = [rows(2, &[1, 2, n, 32]), rows(3, &[1, 2, n, 16])];
            let sinks = rows(4, &[4]);
            let scoring = Scoring { scale: 0.7, softcap: Some(1.5), sinks: Some(&sinks) };
            let sees = |heads: i32| -> Vec<bool> {
                (0..heads * t * n).map(|i| i % n == i / n % t + n - t || i % 3 == 0).collect()
            };
            for mask in [
                Mask::None,
                Mask::Causal,
                Mask::Explicit(Array::from_slice(&sees(1), &[t, n])),
                Mask::Explicit(Array::from_slice(&sees(4), &[1, 4, t, n])),
                Mask::Explicit(Array::from_slice(&sees(1)[..n as usize], &[1, n])),
            ] {
                let whole = over_rows_within(u64::MAX, &q, &k, &v, &mask, scoring)?;
                assert_eq!(whole.shape(), [1, 4, t, 16]);
                // Blocks of seven queries, blocks of one query, and a limit that is too small for even one query.
                for max_scores in [7 * 4 * 40 * 4, 4 * 40 * 4, 0] {
                    let joined = over_rows_within(max_scores, &q, &k, &v, &mask, scoring)?;
                    let close = joined.all_close(&whole, 1e-6, 1e-6, None)?;
                    assert!(close, "{mask:?} {max_scores}");
                }
            }
            Ok(())
        })
        .unwrap();
    }
}
