//! Products with keys that decay from row to row, and the system of equations of the delta rule.
//!
//! Arrays are `[..., heads of keys, heads of values that share one, rows, elements]`, where axes of size 1
//! broadcast. Sums of log decays have one element, or one for each channel of a key.

use mlx_rs::ops::{concatenate, select};
use mlx_rs::Array;

use super::rows::run;
use crate::error::Result;

/// The rows of a part of a block: decays of channels are exponentials of each pair of rows within a part.
const PART: usize = 16;

/// Vectors of some tokens, and the sums of log decays up to each token.
pub struct Tokens<'a> {
    /// `n_kinds` vectors of `n` tokens, `[..., n_kinds * n, k_dim]`: those of all tokens for each kind.
    pub vectors: &'a Array,
    pub n_kinds: i32,
    /// `[..., n, decays]`.
    pub sums: &'a Array,
}

/// Keys of some rows, and the sums of log decays up to each row.
pub struct Keys<'a> {
    /// `[..., L, k_dim]`.
    pub keys: &'a Array,
    /// `[..., L, decays]`.
    pub sums: &'a Array,
}

impl Tokens<'_> {
    fn n(&self) -> i32 {
        self.sums.dim(-2)
    }

    /// Returns `array`, `[..., n_kinds * n, dim]`, as `[..., n_kinds, n, dim]`.
    fn by_kind(&self, array: &Array) -> Result<Array> {
        let mut shape = array.shape().to_vec();
        let (dim, at) = (array.dim(-1), shape.len() - 2);
        shape.splice(at.., [self.n_kinds, self.n(), dim]);
        Ok(array.reshape(&shape)?)
    }

    /// Returns the vectors multiplied by `factors`, `[..., n, 1]` or `[..., n, dim]`.
    pub fn scaled(&self, vectors: &Array, factors: &Array) -> Result<Array> {
        if self.n_kinds == 1 {
            return Ok(vectors.multiply(factors)?);
        }
        joined(&self.by_kind(vectors)?.multiply(factors.expand_dims(-3)?)?)
    }

    /// Returns the products of the vectors with the keys, each decayed from its row to the token: `[...,
    /// n_kinds * n, L]`. Where `seen`, `[..., n, L]`, is false, they are zero.
    pub fn products(&self, rows: &Keys, seen: Option<&Array>) -> Result<Array> {
        if self.sums.dim(-1) > 1 {
            return self.by_channel(rows, seen);
        }
        let products = self.vectors.matmul(rows.keys.swap_axes(-1, -2)?)?;
        let decays = decay(&self.sums.subtract(rows.sums.swap_axes(-1, -2)?)?, seen)?;
        self.scaled(&products, &decays)
    }

    fn by_channel(&self, rows: &Keys, seen: Option<&Array>) -> Result<Array> {
        let ages = self.sums.expand_dims(-2)?.subtract(rows.sums.expand_dims(-3)?)?;
        let seen = seen.map(|seen| seen.expand_dims(-1)).transpose()?;
        // [..., n, L, k_dim]
        let keys = decay(&ages, seen.as_ref())?.multiply(rows.keys.expand_dims(-3)?)?;
        // [..., n, k_dim, n_kinds]
        let n_axes = self.vectors.ndim() as i32;
        let mut axes: Vec<i32> = (0..=n_axes).collect();
        axes[n_axes as usize - 2..].copy_from_slice(&[n_axes - 1, n_axes, n_axes - 2]);
        let vectors = self.by_kind(self.vectors)?.transpose_axes(&axes)?;
        let products = keys.matmul(vectors)?;
        let n_axes = products.ndim() as i32 - 1;
        let mut axes: Vec<i32> = (0..=n_axes).collect();
        axes[n_axes as usize - 2..].copy_from_slice(&[n_axes, n_axes - 2, n_axes - 1]);
        joined(&products.transpose_axes(&axes)?)
    }

    /// Returns [`products`](Self::products) where the rows are those of the tokens, which follow each other:
    /// each sees itself and those before it.
    ///
    /// A decay of a channel goes by way of the last row of its row's part, so that no pair of distant rows has
    /// exponentials of its own. Both factors are at most 1.
    pub fn own_products(&self, rows: &Keys) -> Result<Array> {
        let n = self.n() as usize;
        if self.sums.dim(-1) == 1 || n <= PART {
            return self.products(rows, Some(&triangle(n as i32)?));
        }
        let vectors = self.by_kind(self.vectors)?;
        let part = |array: &Array, from: usize, to: usize| run(array, array.ndim() - 2, from..to);
        let mut columns = Vec::new();
        for start in (0..n).step_by(PART) {
            let end = n.min(start + PART);
            let keys =
                Keys { keys: &part(rows.keys, start, end)?, sums: &part(rows.sums, start, end)? };
            let own = Tokens {
                vectors: &joined(&part(&vectors, start, end)?)?,
                n_kinds: self.n_kinds,
                sums: &part(self.sums, start, end)?,
            };
            let inside = own.products(&keys, Some(&triangle((end - start) as i32)?))?;
            let inside = own.by_kind(&inside)?;
            let mut cells = Vec::new();
            if start > 0 {
                let mut shape = inside.shape().to_vec();
                let rows = shape.len() - 2;
                shape[rows] = start as i32;
                cells.push(Array::zeros::<f32>(&shape)?);
            }
            cells.push(inside);
            if end < n {
                let last = part(rows.sums, end - 1, end)?;
                let keys = keys.keys.multiply(last.subtract(keys.sums)?.exp()?)?;
                let factors = part(self.sums, end, n)?.subtract(last)?.exp()?;
                let later = part(&vectors, end, n)?.multiply(factors.expand_dims(-3)?)?;
                let keys = keys.swap_axes(-1, -2)?.expand_dims(-3)?;
                cells.push(later.matmul(keys)?);
            }
            columns.push(concatenate(&cells, -2)?);
        }
        joined(&concatenate(&columns, -1)?)
    }
}

/// Returns `[..., n_kinds, n, dim]` as `[..., n_kinds * n, dim]`.
fn joined(array: &Array) -> Result<Array> {
    let mut shape = array.shape().to_vec();
    let (dim, at) = (array.dim(-1), shape.len() - 3);
    shape.splice(at.., [array.dim(-3) * array.dim(-2), dim]);
    Ok(array.reshape(&shape)?)
}

/// Returns the decays over these sums of log decays; zero where `seen` is false.
fn decay(sums: &Array, seen: Option<&Array>) -> Result<Array> {
    match seen {
        // Not after the exponential, which may be infinite there.
        Some(seen) => Ok(select(seen, sums, Array::from_f32(f32::NEG_INFINITY))?.exp()?),
        None => Ok(sums.exp()?),
    }
}

/// Returns `[n, n]`, true where the column is at most the row.
pub fn triangle(n: i32) -> Result<Array> {
    matrix(n, |row, column| column <= row)
}

/// Returns a boolean matrix `[n, n]`.
pub fn matrix(n: i32, holds: impl Fn(i32, i32) -> bool) -> Result<Array> {
    let cells = (0..n).flat_map(|row| (0..n).map(move |column| (row, column)));
    let cells: Vec<bool> = cells.map(|(row, column)| holds(row, column)).collect();
    Ok(Array::from_slice(&cells, &[n, n]))
}

/// Returns the inverses of matrices `[..., n, n]` with ones on the diagonal and zeros above it. Of `a` only the
/// elements below the diagonal are read.
///
/// An inverse is that of its blocks on the diagonal, joined in pairs: `[[A, 0], [C, B]]` has the inverse `[[A',
/// 0], [-B' C A', B']]`. Unlike the powers of `a`, which grow where keys repeat, that keeps the precision of
/// solving row by row.
pub fn inverse(a: &Array) -> Result<Array> {
    let n = a.dim(-1);
    let ones = matrix(n, |row, column| row == column)?.as_dtype(a.dtype())?;
    let mut found = ones;
    let mut size = 1;
    while size < n {
        let below = matrix(n, |row, column| {
            row / (2 * size) == column / (2 * size) && row / size % 2 == 1 && column / size % 2 == 0
        })?;
        let between = select(&below, a, Array::from_f32(0.0))?;
        let joining = match size {
            1 => between,
            _ => found.matmul(between.matmul(&found)?)?,
        };
        found = found.subtract(joining)?;
        size *= 2;
    }
    Ok(found)
}
