//! Chains that span several blocks. The work within blocks is computed for many blocks at once. The states between
//! blocks are computed one after the other.
//!
//! With the delta rule the updates of a block are the solution of a triangular system. The inverse of the system's
//! matrix is applied to the values and to the keys before the state `S` at the start of the block is known: `u = U -
//! W S`.

use etkv_core::bookkeeping::{AnchorSource, Chain, RowSource, BLOCK};
use mlx_rs::ops::{concatenate, select};
use mlx_rs::Array;

use super::decays::{inverse, Keys, Tokens};
use super::rows::run as slice;
use super::scan::{Before, Step};
use super::sizes::Sizes;
use crate::error::Result;
use crate::mlx::{cumsum, joined};

/// The maximum number of bytes of the arrays of one operation.
const MAX_BYTES: u64 = 128 << 20;

/// The axis of tokens or rows in `[blocks, k_heads, share, rows, dim]`.
const ROWS: usize = 3;

/// Returns the state after a block of rows, `[k_heads, share, k_dim, v_dim]`.
pub fn fold_rows(step: &Step, anchor: AnchorSource, rows: &[RowSource]) -> Result<Array> {
    let Sizes { k_heads, share, k_dim, v_dim, decays, .. } = step.sizes;
    let Before { keys, updates } = step.rows(rows)?;
    let n = rows.len();
    let keys = keys.reshape(&[k_heads, 1, -1, k_dim])?;
    let updates = updates.reshape(&[k_heads, share, -1, v_dim + decays])?;
    let v_end = v_dim as usize;
    let sums = slice(&updates, 3, v_end..v_end + decays as usize)?;
    let updates = slice(&updates, 3, 0..v_end)?;
    let end = slice(&sums, 2, n - 1..n)?;
    let keys = keys.multiply(end.subtract(sums)?.exp()?)?;
    let added = keys.swap_axes(-1, -2)?.matmul(updates)?;
    match step.state(anchor)? {
        Some(state) => Ok(state.multiply(end.exp()?.swap_axes(-1, -2)?)?.add(added)?),
        None => Ok(added),
    }
}

/// Computes a chain.
pub fn run(step: &mut Step, chain: &Chain) -> Result<()> {
    let Sizes { k_heads, share, k_dim, v_dim, .. } = step.sizes;
    let mut folds = chain.folds.clone();
    let n_before = (chain.position - chain.base) as usize;
    // The plan already contains the state after a whole block of rows.
    let (anchor, rows) = match n_before == BLOCK as usize {
        true => (AnchorSource::Fold(folds.next().unwrap_or_default()), &[][..]),
        false => (chain.anchor, &chain.rows[chain.rows.len() - n_before..]),
    };
    let aligned = Aligned::of(step, chain, rows)?;
    let mut state = match step.state(anchor)? {
        Some(state) => state.reshape(&[1, k_heads, share, k_dim, v_dim])?,
        None => Array::zeros::<f32>(&[1, k_heads, share, k_dim, v_dim])?,
    };
    let (mut outs, mut updates) = (Vec::new(), Vec::new());
    let at_once = blocks_at_once(step.sizes);
    for start in (0..aligned.n_blocks).step_by(at_once) {
        let blocks = aligned.blocks(start..aligned.n_blocks.min(start + at_once))?;
        let (mut states, mut of_blocks) = (Vec::new(), Vec::new());
        for at in 0..blocks.n {
            let update = blocks.updates(at, &state)?;
            states.push(state.clone());
            if let Some(fold) = folds.next() {
                state = blocks.after(at, &state, &update)?;
                step.add_fold(fold, state.reshape(&[k_heads, share, k_dim, v_dim])?)?;
            }
            of_blocks.push(update);
        }
        let update = concatenate(&of_blocks, 0)?;
        outs.push(blocks.outputs(&concatenate(&states, 0)?, &update)?);
        updates.push(update);
    }
    let flat = |arrays: &[Array]| aligned.flat(&concatenate(arrays, 0)?);
    let (out, updates) = (flat(&outs)?, flat(&updates)?);
    let sums = aligned.flat(&aligned.sums)?;
    step.add(chain.tokens.clone().map(Some), out, &updates, &sums)
}

/// Returns the number of blocks whose arrays have at most [`MAX_BYTES`].
fn blocks_at_once(sizes: Sizes) -> usize {
    let of = |size: i32| u64::from(size.unsigned_abs());
    let block = BLOCK as u64;
    let pairs = if sizes.decays > 1 { 256 * of(sizes.k_dim) } else { 2 * block * block };
    let largest = pairs.max(of(sizes.k_dim) * of(sizes.v_dim));
    (MAX_BYTES / (4 * of(sizes.heads()) * largest).max(1)).clamp(1, 1 << 16) as usize
}

/// A chain and the rows before it, in blocks that begin at multiples of [`BLOCK`] positions. A row before the chain
/// is treated as a token whose update is known. Tokens of zeros fill the last block.
struct Aligned {
    sizes: Sizes,
    n_blocks: usize,
    /// The number of rows before the chain, and the number of tokens of the chain.
    n_before: usize,
    n: usize,
    /// `[blocks, k_heads, 1, BLOCK, k_dim]`.
    q: Array,
    k: Array,
    /// Values multiplied by the write strengths; for rows before the chain, their updates.
    /// `[blocks, k_heads, share, BLOCK, v_dim]`.
    v: Array,
    /// `[blocks, k_heads, share, BLOCK, 1]`, zero for rows before the chain.
    beta: Option<Array>,
    /// Sums of log decays from the beginning of a block, `[blocks, k_heads, share, BLOCK, decays]`.
    sums: Array,
}

impl Aligned {
    fn of(step: &Step, chain: &Chain, rows: &[RowSource]) -> Result<Self> {
        let Sizes { k_heads, share, v_dim, decays, .. } = step.sizes;
        let (n_before, n) = (rows.len(), chain.tokens.len());
        let n_blocks = (n_before + n).div_ceil(BLOCK as usize);
        let tail = n_blocks * BLOCK as usize - n_before - n;
        let align = |array: Option<&Array>, before: Option<&Array>, share: i32, dim: i32| {
            let heads = k_heads * share;
            let zeros = |n: usize| Array::zeros::<f32>(&[heads, n as i32, dim]);
            let mut parts = Vec::new();
            match before {
                Some(before) => parts.push(before.clone()),
                None if n_before > 0 => parts.push(zeros(n_before)?),
                None => {}
            }
            match array {
                Some(array) => {
                    parts.push(slice(array, 1, chain.tokens.clone())?);
                    if tail > 0 {
                        parts.push(zeros(tail)?);
                    }
                }
                None => parts.push(zeros(n + tail)?),
            }
            let all = joined(&parts, 1)?;
            let all = all.reshape(&[k_heads, share, n_blocks as i32, BLOCK, dim])?;
            Ok::<_, crate::Error>(all.transpose_axes(&[2, 0, 1, 3, 4])?)
        };
        let inputs = &step.inputs;
        let mut before = None;
        let mut first_g = None;
        if n_before > 0 {
            let Before { keys, updates } = step.rows(rows)?;
            let v_end = v_dim as usize;
            let sums = slice(&updates, 2, v_end..v_end + decays as usize)?;
            // The sums of the first block continue from the sum of the last row.
            let last = slice(&sums, 1, n_before - 1..n_before)?;
            first_g = Some(match n_before {
                1 => last,
                _ => {
                    let shape = [k_heads * share, n_before as i32 - 1, decays];
                    concatenate(&[Array::zeros::<f32>(&shape)?, last], 1)?
                }
            });
            before = Some((keys, slice(&updates, 2, 0..v_end)?, sums));
        }
        let [keys, updates, known] = match &before {
            Some((keys, updates, sums)) => [Some(keys), Some(updates), Some(sums)],
            None => [None; 3],
        };
        let v = match &inputs.beta {
            Some(beta) => inputs.v.multiply(beta)?,
            None => inputs.v.clone(),
        };
        let g = align(Some(&inputs.g), first_g.as_ref(), share, decays)?;
        let mut sums = cumsum(&g, ROWS as i32)?;
        if let Some(known) = known {
            let is_row: Vec<bool> =
                (0..n_blocks * BLOCK as usize).map(|at| at < n_before).collect();
            let is_row = Array::from_slice(&is_row, &[n_blocks as i32, 1, 1, BLOCK, 1]);
            sums = select(&is_row, align(None, Some(known), share, decays)?, sums)?;
        }
        let beta = inputs.beta.as_ref();
        Ok(Self {
            sizes: step.sizes,
            n_blocks,
            n_before,
            n,
            q: align(Some(&inputs.q), None, 1, step.sizes.k_dim)?,
            k: align(Some(&inputs.k), keys, 1, step.sizes.k_dim)?,
            v: align(Some(&v), updates, share, v_dim)?,
            beta: beta.map(|beta| align(Some(beta), None, share, 1)).transpose()?,
            sums,
        })
    }

    /// Returns the rows of the chain's tokens: `[blocks, k_heads, share, BLOCK, dim]` as `[heads, n, dim]`.
    fn flat(&self, array: &Array) -> Result<Array> {
        let dim = array.dim(-1);
        let rows = array.transpose_axes(&[1, 2, 0, 3, 4])?;
        let rows = rows.reshape(&[self.sizes.heads(), -1, dim])?;
        slice(&rows, 1, self.n_before..self.n_before + self.n)
    }

    /// Computes, for some blocks, the terms that do not depend on the states at their starts.
    fn blocks(&self, range: std::ops::Range<usize>) -> Result<Blocks> {
        let of = |array: &Array| slice(array, 0, range.clone());
        let (q, k, v, sums) = (of(&self.q)?, of(&self.k)?, of(&self.v)?, of(&self.sums)?);
        let block = BLOCK as usize;
        let kept = sums.exp()?;
        let end = slice(&sums, ROWS, block - 1..block)?;
        let to_end = k.multiply(end.subtract(&sums)?.exp()?)?.swap_axes(-1, -2)?;
        let total = end.exp()?.swap_axes(-1, -2)?;
        let from_start = q.multiply(&kept)?;
        let keys = Keys { keys: &k, sums: &sums };
        let Some(beta) = &self.beta else {
            let own = Tokens { vectors: &q, n_kinds: 1, sums: &sums }.own_products(&keys)?;
            return Ok(Blocks { n: range.len(), own, from_start, to_end, total, v, w: None });
        };
        let beta = of(beta)?;
        let vectors = concatenate(&[&q, &k], -2)?;
        let own = Tokens { vectors: &vectors, n_kinds: 2, sums: &sums }.own_products(&keys)?;
        let inverse = inverse(&slice(&own, ROWS, block..2 * block)?.multiply(&beta)?)?;
        let own = slice(&own, ROWS, 0..block)?;
        let w = inverse.matmul(k.multiply(kept.multiply(beta)?)?)?;
        let v = inverse.matmul(v)?;
        Ok(Blocks { n: range.len(), own, from_start, to_end, total, v, w: Some(w) })
    }
}

/// The terms of blocks that do not depend on the states at their starts. A state is
/// `[1, k_heads, share, k_dim, v_dim]`.
struct Blocks {
    n: usize,
    /// The weight of each update in the output of each query, `[blocks, k_heads, share, BLOCK, BLOCK]`.
    own: Array,
    /// Queries, decayed from the start of the block: `[blocks, k_heads, share, BLOCK, k_dim]`.
    from_start: Array,
    /// Keys, decayed to the end of the block: `[blocks, k_heads, share, k_dim, BLOCK]`.
    to_end: Array,
    /// The decay of a block, `[blocks, k_heads, share, decays, 1]`.
    total: Array,
    /// The updates if the state is zero, `[blocks, k_heads, share, BLOCK, v_dim]`.
    v: Array,
    /// The matrix whose product with the state is subtracted from the updates,
    /// `[blocks, k_heads, share, BLOCK, k_dim]`.
    w: Option<Array>,
}

impl Blocks {
    /// Returns the updates of a block, `[1, k_heads, share, BLOCK, v_dim]`.
    fn updates(&self, at: usize, state: &Array) -> Result<Array> {
        let v = slice(&self.v, 0, at..at + 1)?;
        match &self.w {
            Some(w) => Ok(v.subtract(slice(w, 0, at..at + 1)?.matmul(state)?)?),
            None => Ok(v),
        }
    }

    /// Returns the state after a block.
    fn after(&self, at: usize, state: &Array, updates: &Array) -> Result<Array> {
        let added = slice(&self.to_end, 0, at..at + 1)?.matmul(updates)?;
        Ok(state.multiply(slice(&self.total, 0, at..at + 1)?)?.add(added)?)
    }

    /// Returns the outputs of all blocks, `[blocks, k_heads, share, BLOCK, v_dim]`.
    fn outputs(&self, states: &Array, updates: &Array) -> Result<Array> {
        Ok(self.from_start.matmul(states)?.add(self.own.matmul(updates)?)?)
    }
}
