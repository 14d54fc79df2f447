//! The gated delta rule: each head has a state, which each token decays and corrects.
//!
//! For each token, with the state `S` of a head, `[v_dim, k_dim]`:
//!
//! ```text
//! S = decay * S
//! S = S + c k^T    where the correction is c = beta * (v - S k)
//! y = S q
//! ```
//!
//! Tokens are computed in chunks. Within a chunk, the corrections `C` depend on the state before the chunk and on the
//! corrections of earlier tokens:
//!
//! ```text
//! (I + L) C = beta * (V - P K S^T)    where L[t, s] = beta[t] D[t, s] (k[t] . k[s]) for s < t
//! Y = P Q S^T + (D * Q K^T) C
//! ```
//!
//! `D[t, s]` is the product of the decays after token `s` up to token `t`, and `P[t]` the product of all decays up to
//! `t`. Both are computed as products, because a quotient or a logarithm fails for a decay of 0. `I + L` is inverted
//! by blocks, as in substitution, because powers of `L` grow without limit for similar keys.

use mlx_rs::ops::{concatenate, matmul, select};
use mlx_rs::{Array, Dtype};

use super::{expect_dtype, expect_float, expect_shape};
use crate::error::{fail, Result};
use etkv::mlx::{cast, cumprod, slice_axis};
use etkv::recurrent::{inverse, matrix};

/// The maximum tokens of a chunk, a power of two.
const CHUNK: i32 = 32;

/// The axis of tokens in `[B, k_heads, v_heads / k_heads, T, ...]`.
const TOKENS: usize = 3;

/// The sizes of the rule.
pub struct Rule {
    pub dtype: Dtype,
    pub k_dim: i32,
    pub v_dim: i32,
    pub k_heads: i32,
    pub v_heads: i32,
}

impl Rule {
    /// Returns the outputs `[B, T, v_heads, v_dim]` and the state after the last token. Computes in float32. The
    /// number of tokens is that of `q`. The input `T` has the same value, and is not read.
    pub fn run(&self, inputs: &[&Array]) -> Result<Vec<Array>> {
        let &[q, k, v, decay, beta, state, tokens] = inputs else {
            fail!(Internal, "cannot run the gated delta rule with {} inputs", inputs.len());
        };
        let Self { k_dim, v_dim, k_heads, v_heads, .. } = *self;
        let (batch, n) = match *q.shape() {
            [batch, n, ..] if batch > 0 && n > 0 => (batch, n),
            _ => fail!(Program, "expected `q` of shape [B, T, ...], got {:?}", q.shape()),
        };
        expect_dtype("q", q, self.dtype)?;
        expect_dtype("T", tokens, Dtype::Int32)?;
        expect_shape("T", tokens, &[])?;
        for (name, array, shape) in [
            ("q", q, &[batch, n, k_heads, k_dim][..]),
            ("k", k, &[batch, n, k_heads, k_dim]),
            ("v", v, &[batch, n, v_heads, v_dim]),
            ("g", decay, &[batch, n, v_heads]),
            ("beta", beta, &[batch, n, v_heads]),
            ("state_in", state, &[batch, v_heads, v_dim, k_dim]),
        ] {
            expect_float(name, array)?;
            expect_shape(name, array, shape)?;
        }
        // Value heads that share a key head are adjacent.
        let shared = v_heads / k_heads;
        let by_head = |array: &Array, shared, size| -> Result<Array> {
            let array = cast(array, Dtype::Float32)?.reshape(&[batch, n, k_heads, shared, size])?;
            Ok(array.transpose_axes(&[0, 2, 3, 1, 4])?)
        };
        let (q, k) = (by_head(q, 1, k_dim)?, by_head(k, 1, k_dim)?);
        let v = by_head(v, shared, v_dim)?;
        let (decay, beta) = (by_head(decay, shared, 1)?, by_head(beta, shared, 1)?);
        let mut state =
            cast(state, Dtype::Float32)?.reshape(&[batch, k_heads, shared, v_dim, k_dim])?;

        let mut outputs = Vec::new();
        for start in (0..n).step_by(CHUNK as usize) {
            let stop = n.min(start + CHUNK);
            let part = |array: &Array| slice_axis(array, TOKENS, start, stop, 1);
            let chunk = Chunk {
                q: part(&q)?,
                k: part(&k)?,
                v: part(&v)?,
                decay: part(&decay)?,
                beta: part(&beta)?,
            };
            let (output, after) = chunk.run(&state, stop - start)?;
            outputs.push(output);
            state = after;
        }
        let y = concatenate(&outputs, TOKENS as i32)?.transpose_axes(&[0, 3, 1, 2, 4])?;
        let y = cast(&y, self.dtype)?.reshape(&[batch, n, v_heads, v_dim])?;
        let state = cast(&state, self.dtype)?.reshape(&[batch, v_heads, v_dim, k_dim])?;
        Ok(vec![y, state])
    }
}

/// Consecutive tokens, `[B, k_heads, v_heads / k_heads, n, ...]`.
struct Chunk {
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
}

impl Chunk {
    /// Returns the outputs, and the state after the tokens.
    fn run(&self, state: &Array, n: i32) -> Result<(Array, Array)> {
        let (columns, keys) = (rotated(state)?, rotated(&self.k)?);
        let decayed = cumprod(&self.decay, TOKENS as i32)?;
        let recalled = matmul(&self.k, &columns)?.multiply(&decayed)?;
        let corrections = self.v.subtract(recalled)?.multiply(&self.beta)?;
        let answers = matmul(&self.q, &columns)?.multiply(&decayed)?;
        let scores = matmul(&self.q, &keys)?;
        let last = |array: &Array| slice_axis(array, TOKENS, n - 1, n, 1);
        let kept = state.multiply(last(&decayed)?)?;
        if n == 1 {
            let y = answers.add(scores.multiply(&corrections)?)?;
            return Ok((y, kept.add(rotated(&corrections)?.multiply(&self.k)?)?));
        }
        let between = self.between(n)?;
        let likeness = matmul(&self.k, &keys)?.multiply(&between)?.multiply(&self.beta)?;
        let corrections = matmul(inverse(&likeness)?, &corrections)?;
        let y = answers.add(matmul(scores.multiply(&between)?, &corrections)?)?;
        let weights = rotated(&last(&between)?)?;
        let added = matmul(rotated(&corrections)?, self.k.multiply(weights)?)?;
        Ok((y, kept.add(added)?))
    }

    /// Returns `D`: for each token `t` (last axis but one) and token `s` (last axis), the product of the decays of
    /// the tokens after `s`, including `t`. It is 1 if `s` is `t`, and 0 if `s` is later.
    fn between(&self, n: i32) -> Result<Array> {
        let factors = select(matrix(n, |t, s| s < t)?, &self.decay, Array::from_f32(1.0))?;
        let products = cumprod(&factors, TOKENS as i32)?;
        Ok(products.multiply(matrix(n, |t, s| s <= t)?)?)
    }
}

/// Returns a view with the last two axes exchanged.
fn rotated(array: &Array) -> Result<Array> {
    Ok(array.swap_axes(-1, -2)?)
}
