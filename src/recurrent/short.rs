//! Tokens within a block: one token, several tokens, or a tree. Several sequences are computed at once.

use etkv_core::bookkeeping::RowSource;
use mlx_rs::ops::{addmm, concatenate, select};
use mlx_rs::Array;

use super::decays::{inverse, Keys, Tokens};
use super::groups::Group;
use super::rows::{run as slice, take};
use super::scan::{Before, Step};
use super::sizes::Sizes;
use crate::error::Result;
use crate::mlx::{cumsum, joined};

/// Computes groups of tokens.
pub fn run(step: &mut Step, groups: &[Group]) -> Result<()> {
    let sizes = step.sizes;
    let batch = Batch::of(groups);
    let n = batch.n as i32;
    let tokens = |array: &Array, heads| batch.take(array, &batch.tokens, heads);
    let k_heads = [sizes.k_heads, 1];
    let heads = [sizes.k_heads, sizes.share];
    let q = tokens(&step.inputs.q, k_heads)?;
    let k = tokens(&step.inputs.k, k_heads)?;
    let v = tokens(&step.inputs.v, heads)?;
    let g = tokens(&step.inputs.g, heads)?;
    let beta = step.inputs.beta.as_ref().map(|beta| tokens(beta, heads)).transpose()?;
    let before = batch.before(step, groups)?;
    let sums = batch.sums(groups, g, before.as_ref().map(|before| &before.sums))?;

    // Queries read the state and the rows. With the delta rule, keys read the state and the rows too.
    let vectors = if sizes.delta { concatenate(&[&q, &k], -2)? } else { q.clone() };
    let n_kinds = if sizes.delta { 2 } else { 1 };
    let reading = Tokens { vectors: &vectors, n_kinds, sums: &sums };
    let mut read: Option<Array> = None;
    if let Some(state) = batch.states(step, groups)? {
        read = Some(reading.scaled(&vectors, &sums.exp()?)?.matmul(state)?);
    }
    if let Some(before) = &before {
        let keys = Keys { keys: &before.keys, sums: &before.sums };
        let weights = reading.products(&keys, None)?;
        read = Some(plus_product(read, &weights, &before.updates)?);
    }
    let kind = |array: &Array, kind: usize| {
        slice(array, array.ndim() - 2, kind * batch.n..(kind + 1) * batch.n)
    };
    let seen_by_q = read.as_ref().map(|read| kind(read, 0)).transpose()?;

    // For each token, the weights of the updates of the step's tokens. A token's own update is not decayed.
    let own = match batch.n {
        1 => q.matmul(k.swap_axes(-1, -2)?)?,
        _ => {
            let keys = Keys { keys: &k, sums: &sums };
            reading.products(&keys, Some(&batch.seen(groups)))?
        }
    };
    let mut updates = v;
    if let Some(beta) = &beta {
        if let Some(read) = &read {
            updates = updates.subtract(kind(read, 1)?)?;
        }
        updates = updates.multiply(beta)?;
        if batch.n > 1 {
            updates = inverse(&kind(&own, 1)?.multiply(beta)?)?.matmul(updates)?;
        }
    }
    let out = plus_product(seen_by_q, &kind(&own, 0)?, &updates)?;
    let flat = |array: &Array| batch.flat(array, sizes, n);
    let results = [flat(&out)?, flat(&updates)?, flat(&sums)?];
    let [out, updates, sums] = results;
    step.add(batch.named(groups), out, &updates, &sums)
}

/// Returns the product of two matrices, added to `sum`.
fn plus_product(sum: Option<Array>, a: &Array, b: &Array) -> Result<Array> {
    match sum {
        Some(sum) => Ok(addmm(sum, a, b, None, None)?),
        None => Ok(a.matmul(b)?),
    }
}

/// Groups side by side. They are padded to the number of tokens and of rows of the longest group.
struct Batch {
    size: usize,
    /// The number of tokens of a group.
    n: usize,
    /// The number of rows before the tokens of a group.
    n_rows: usize,
    /// The index of each token, group by group. Padding repeats a token of its group.
    tokens: Vec<i32>,
}

/// The rows before the tokens of a batch.
struct Padded {
    /// `[groups, k_heads, 1, m, k_dim]`.
    keys: Array,
    /// `[groups, k_heads, share, m, v_dim]`.
    updates: Array,
    /// `[groups, k_heads, share, m, decays]`.
    sums: Array,
}

impl Batch {
    fn of(groups: &[Group]) -> Self {
        let n = groups.iter().map(|group| group.tokens.len()).max().unwrap_or(0);
        let n_rows = groups.iter().map(|group| group.rows.len()).max().unwrap_or(0);
        let padded = |group: &Group| {
            let first = group.tokens.first().copied().unwrap_or(0);
            let tokens = group.tokens.clone().into_iter().chain(std::iter::repeat(first));
            tokens.take(n).map(|token| token as i32).collect::<Vec<_>>()
        };
        let tokens = groups.iter().flat_map(padded).collect();
        Self { size: groups.len(), n, n_rows, tokens }
    }

    /// Returns these rows of `array`, `[heads, rows, dim]`, as `[groups, k_heads, share, rows, dim]`.
    fn take(&self, array: &Array, indices: &[i32], [k_heads, share]: [i32; 2]) -> Result<Array> {
        let (rows, dim) = (take(array, indices, 1)?, array.dim(-1));
        if self.size == 1 {
            return Ok(rows.reshape(&[1, k_heads, share, -1, dim])?);
        }
        let rows = rows.reshape(&[k_heads, share, self.size as i32, -1, dim])?;
        Ok(rows.transpose_axes(&[2, 0, 1, 3, 4])?)
    }

    /// Returns the rows before the tokens. If a group has fewer rows, zeros precede them.
    fn before(&self, step: &Step, groups: &[Group]) -> Result<Option<Padded>> {
        if self.n_rows == 0 {
            return Ok(None);
        }
        let Sizes { k_heads, share, v_dim, .. } = step.sizes;
        // `Step::rows` returns the rows that are in slots before all others.
        let mut rows: Vec<RowSource> = groups.iter().flat_map(|group| group.rows.clone()).collect();
        let is_token = |row: &RowSource| matches!(row, RowSource::Token(_));
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by_key(|&at| is_token(&rows[at]));
        let mut places = vec![0; rows.len()];
        order.iter().enumerate().for_each(|(place, &at)| places[at] = place as i32);
        rows.sort_by_key(is_token);
        let Before { keys, updates } = step.rows(&rows)?;
        let (mut indices, mut is_row, mut next) = (Vec::new(), Vec::new(), 0);
        for group in groups {
            let n_none = self.n_rows - group.rows.len();
            indices.extend(std::iter::repeat_n(0, n_none));
            is_row.extend(std::iter::repeat_n(false, n_none));
            indices.extend_from_slice(&places[next..next + group.rows.len()]);
            is_row.extend(std::iter::repeat_n(true, group.rows.len()));
            next += group.rows.len();
        }
        let mut keys = self.take(&keys, &indices, [k_heads, 1])?;
        let mut updates = self.take(&updates, &indices, [k_heads, share])?;
        if is_row.contains(&false) {
            let is_row =
                Array::from_slice(&is_row, &[self.size as i32, 1, 1, self.n_rows as i32, 1]);
            keys = select(&is_row, keys, Array::from_f32(0.0))?;
            updates = select(&is_row, updates, Array::from_f32(0.0))?;
        }
        let row = updates.dim(-1) as usize;
        let part = |from: usize, to: usize| slice(&updates, updates.ndim() - 1, from..to);
        let (updates, sums) = (part(0, v_dim as usize)?, part(v_dim as usize, row)?);
        Ok(Some(Padded { keys, updates, sums }))
    }

    /// Returns the cumulative log decays up to each token. `g` has the log decays of tokens, and `before` the
    /// cumulative log decays up to each row before them.
    fn sums(&self, groups: &[Group], g: Array, before: Option<&Array>) -> Result<Array> {
        let axis = g.ndim() - 2;
        let own = match groups {
            _ if self.n == 1 => g,
            [group] if group.is_chain() => cumsum(&g, axis as i32)?,
            _ => {
                let seen = self.seen(groups).expand_dims(-1)?;
                let each = select(&seen, g.expand_dims(-3)?, Array::from_f32(0.0))?;
                each.sum_axes(&[-2], false)?
            }
        };
        match before {
            Some(sums) => {
                let last = slice(sums, axis, self.n_rows - 1..self.n_rows)?;
                Ok(own.add(last)?)
            }
            None => Ok(own),
        }
    }

    /// Returns which tokens each token sees, `[groups, 1, 1, n, n]`.
    fn seen(&self, groups: &[Group]) -> Array {
        let mut cells = Vec::with_capacity(self.size * self.n * self.n);
        for group in groups {
            let seen = group.seen();
            for token in 0..self.n {
                match seen.get(token) {
                    Some(seen) => cells.extend_from_slice(seen),
                    None => cells.extend(std::iter::repeat_n(false, group.tokens.len())),
                }
                cells.extend(std::iter::repeat_n(false, self.n - group.tokens.len()));
            }
        }
        let n = self.n as i32;
        Array::from_slice(&cells, &[self.size as i32, 1, 1, n, n])
    }

    /// Returns the states of the groups, `[groups, k_heads, share, k_dim, v_dim]`; `None` if all are zero.
    fn states(&self, step: &Step, groups: &[Group]) -> Result<Option<Array>> {
        let Sizes { k_heads, share, k_dim, v_dim, .. } = step.sizes;
        let shape = [1, k_heads, share, k_dim, v_dim];
        let states = groups
            .iter()
            .map(|group| step.state(group.anchor))
            .collect::<Result<Vec<Option<Array>>>>()?;
        if states.iter().all(Option::is_none) {
            return Ok(None);
        }
        let states = states
            .into_iter()
            .map(|state| match state {
                Some(state) => Ok(state.reshape(&shape)?),
                None => Ok(Array::zeros::<f32>(&shape)?),
            })
            .collect::<Result<Vec<Array>>>()?;
        joined(&states, 0).map(Some)
    }

    /// Returns `[groups, k_heads, share, n, dim]` as `[heads, groups * n, dim]`.
    fn flat(&self, array: &Array, sizes: Sizes, n: i32) -> Result<Array> {
        let dim = array.dim(-1);
        let array = match self.size {
            1 => array.clone(),
            _ => array.transpose_axes(&[1, 2, 0, 3, 4])?,
        };
        Ok(array.reshape(&[sizes.heads(), self.size as i32 * n, dim])?)
    }

    /// Returns the token of each row of [`flat`](Self::flat), `None` for padding.
    fn named(&self, groups: &[Group]) -> Vec<Option<usize>> {
        let of = |group: &Group| {
            let tokens = group.tokens.iter().map(|&token| Some(token)).collect::<Vec<_>>();
            tokens.into_iter().chain(std::iter::repeat(None)).take(self.n)
        };
        groups.iter().flat_map(of).collect()
    }
}
