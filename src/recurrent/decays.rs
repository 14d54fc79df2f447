//! Products with keys that decay from row to row, and the triangular system of the delta rule.
//!
//! Arrays are `[..., k_heads, share, rows, elements]`, where `share` is the number of value heads for each key head.
//! Axes of size 1 broadcast. Sums of log decays have one element, or one for each channel of a key.

use mlx_rs::ops::{concatenate, select};
use mlx_rs::Array;

use super::rows::run;
use crate::error::Result;
use crate::mlx;

/// The number of rows of a part of a block. Within a part, the decays of all channels are computed for each pair of
/// rows.
const PART: usize = 16;

/// Vectors of some tokens, and the cumulative log decays up to each token.
pub struct Tokens<'a> {
    /// `n_kinds` vectors of `n` tokens, `[..., n_kinds * n, k_dim]`, ordered by kind and then by token.
    pub vectors: &'a Array,
    pub n_kinds: i32,
    /// `[..., n, decays]`.
    pub sums: &'a Array,
}

/// Keys of some rows, and the cumulative log decays up to each row.
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

    /// Returns the products of the vectors with the keys, each decayed from its row to the token:
    /// `[..., n_kinds * n, L]`. They are zero where `seen`, `[..., n, L]`, is false.
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

    /// Returns [`products`](Self::products) if the rows are the tokens themselves: each token sees itself and the
    /// tokens before it.
    ///
    /// For distant pairs of rows, a channel's decay is the product of two factors: the decay to the last row of the
    /// row's part, and the decay from that row. So only pairs within a part need separate exponentials. Both factors
    /// are at most 1.
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

/// Returns the decays, the exponentials of `sums`. They are zero where `seen` is false.
fn decay(sums: &Array, seen: Option<&Array>) -> Result<Array> {
    match seen {
        // Selects before the exponential, which may be infinite where `seen` is false.
        Some(seen) => Ok(select(seen, sums, Array::from_f32(f32::NEG_INFINITY))?.exp()?),
        None => Ok(sums.exp()?),
    }
}

/// Returns a boolean matrix `[n, n]` that is true where the column is at most the row.
pub fn triangle(n: i32) -> Result<Array> {
    matrix(n, |row, column| column <= row)
}

/// Returns a boolean matrix `[n, n]` with the values of `holds(row, column)`.
pub fn matrix(n: i32, holds: impl Fn(i32, i32) -> bool) -> Result<Array> {
    let cells = (0..n).flat_map(|row| (0..n).map(move |column| (row, column)));
    let cells: Vec<bool> = cells.map(|(row, column)| holds(row, column)).collect();
    mlx::array_of(&cells, &[n, n])
}

/// Returns the inverses of matrices `[..., n, n]` with ones on the diagonal and zeros above it. Only elements of `a`
/// below the diagonal are read.
///
/// The diagonal blocks are inverted and joined in pairs: `[[A, 0], [C, B]]` has the inverse `[[A', 0], [-B' C A',
/// B']]`. This is as precise as solving row by row. A sum of powers of `a` would be less precise, because they grow
/// if keys repeat.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mlx::cumsum;
    use crate::recurrent::tests::Random;

    const K_HEADS: i32 = 2;
    const SHARE: i32 = 3;
    const N: i32 = 64;

    fn array(random: &mut Random, shape: &[i32], scale: f32) -> Array {
        let n = shape.iter().product::<i32>();
        let values: Vec<f32> = (0..n).map(|_| scale * (random.unit() * 2.0 - 1.0)).collect();
        Array::from_slice(&values, shape)
    }

    fn values(array: &Array) -> Vec<f32> {
        crate::mlx::elements(&array.contiguous().unwrap()).unwrap()
    }

    /// Compares each product with its definition in float64.
    fn own_products_are_those_of_the_definition(k_dim: i32, decays: i32) {
        crate::mlx::run(|| {
            let mut random = Random::new(u64::from(k_dim.unsigned_abs()));
            let q = array(&mut random, &[2, K_HEADS, 1, N, k_dim], 1.0);
            let k = array(&mut random, &[2, K_HEADS, 1, N, k_dim], 1.0);
            let steps = array(&mut random, &[2, K_HEADS, SHARE, N, decays], 1.0);
            let sums = cumsum(&steps.abs()?.negative()?, 3)?;
            let vectors = concatenate(&[&q, &k], -2)?;
            let tokens = Tokens { vectors: &vectors, n_kinds: 2, sums: &sums };
            let found = tokens.own_products(&Keys { keys: &k, sums: &sums })?;
            assert_eq!(found.shape(), [2, K_HEADS, SHARE, 2 * N, N]);
            let (found, sums) = (values(&found), values(&sums));
            let (q, k) = (values(&q), values(&k));
            let [n, width, decays] = [N, k_dim, decays].map(|size| size as usize);
            for (row, found) in found.chunks(n).enumerate() {
                let (block, at) = (row / (2 * n), row % (2 * n));
                let k_head = block / SHARE as usize;
                let (of, token) = (if at < n { &q } else { &k }, at % n);
                for (other, &found) in found.iter().enumerate() {
                    let product = |c: usize| {
                        let decay = if decays > 1 { c } else { 0 };
                        let sum = |at: usize| f64::from(sums[(block * n + at) * decays + decay]);
                        let element =
                            |of: &[f32], at: usize| f64::from(of[(k_head * n + at) * width + c]);
                        element(of, token) * element(&k, other) * (sum(token) - sum(other)).exp()
                    };
                    let expected: f64 = match other <= token {
                        true => (0..width).map(product).sum(),
                        false => 0.0,
                    };
                    let off = (f64::from(found) - expected).abs();
                    assert!(
                        off < 1e-4,
                        "block {block}, row {at}, column {other}: {found}, not {expected}"
                    );
                }
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn own_products_with_a_decay_of_each_head_are_those_of_the_definition() {
        own_products_are_those_of_the_definition(24, 1);
    }

    #[test]
    fn own_products_with_a_decay_of_each_channel_are_those_of_the_definition() {
        own_products_are_those_of_the_definition(20, 20);
    }

    #[test]
    fn inverses_times_their_matrices_are_ones_on_the_diagonal() {
        crate::mlx::run(|| {
            for n in [1, 5, 33, 64] {
                let a = array(&mut Random::new(7), &[3, 2, n, n], 0.3);
                let ones = matrix(n, |row, column| row == column)?.as_dtype(a.dtype())?;
                let below = matrix(n, |row, column| column < row)?;
                let whole = select(&below, &a, Array::from_f32(0.0))?.add(&ones)?;
                let product = values(&inverse(&a)?.matmul(&whole)?.subtract(&ones)?);
                let worst = product.iter().fold(0f32, |worst, x| worst.max(x.abs()));
                assert!(worst < 1e-4, "{worst} for {n} rows");
            }
            Ok(())
        })
        .unwrap();
    }
}
