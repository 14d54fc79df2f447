//! Products with selected weights. All rows that select the same weight are multiplied by it in one product.
//!
//! On a CPU, MLX would multiply row by row on one thread, and would convert floats to float32.
//! [`many_rows`](super::many_rows) has the reason on CUDA.

use mlx_rs::ops::{broadcast_to, concatenate};
use mlx_rs::Array;

use super::shape::Sizes;
use crate::error::{fail, Result};
use etkv::mlx::{array_of, slice_axis};

/// The rows of a product, grouped by weight: an order in which rows of the same weight are adjacent, and the number
/// of rows of each weight.
#[derive(Debug, PartialEq, Eq)]
struct Groups {
    /// `None` if the rows are already in that order.
    order: Option<Vec<u32>>,
    weights: Vec<(i32, i32)>,
}

impl Groups {
    fn new(indices: &[i32]) -> Self {
        let mut order: Vec<u32> = (0..indices.len() as u32).collect();
        let is_sorted = indices.is_sorted();
        if !is_sorted {
            order.sort_by_key(|&row| indices[row as usize]);
        }
        let mut weights: Vec<(i32, i32)> = Vec::new();
        for &row in &order {
            let weight = indices[row as usize];
            match weights.last_mut() {
                Some((last, n)) if *last == weight => *n += 1,
                _ => weights.push((weight, 1)),
            }
        }
        Self { order: (!is_sorted).then_some(order), weights }
    }
}

/// Multiplies each matrix of `x`, `[..., M, in]`, by the weight that its index selects. The result is `[..., M,
/// out]`. Its leading axes are `leading`, the axes of the indices. `product` multiplies rows, `[1, rows, in]`, by a
/// weight.
pub fn multiply(
    x: &Array,
    indices: &[i32],
    leading: &[i32],
    product: impl Fn(&Array, i32) -> Result<Array>,
) -> Result<Array> {
    let Some((&[m, features], _)) =
        x.shape().split_last_chunk::<2>().map(|(rest, last)| (last, rest))
    else {
        fail!(Program, "expected matrices, got shape {:?}", x.shape());
    };
    let n = indices.len() as i32;
    let all: Sizes = leading.iter().copied().chain([m, features]).collect();
    let rows = broadcast_to(x, &all)?.reshape(&[n, m, features])?;
    let groups = Groups::new(indices);
    let rows = match &groups.order {
        Some(order) => rows.take_axis(array_of(order, &[n])?, 0)?,
        None => rows,
    };
    let mut made = Vec::with_capacity(groups.weights.len());
    let mut start = 0;
    for &(weight, count) in &groups.weights {
        let part = slice_axis(&rows, 0, start, start + count, 1)?;
        made.push(product(&part.reshape(&[1, count * m, features])?, weight)?);
        start += count;
    }
    let outputs = made.first().map_or(0, |first| first.dim(2));
    let made = concatenate(&made, 1)?.reshape(&[n, m, outputs])?;
    let made = match &groups.order {
        Some(order) => made.take_axis(array_of(&inverse(order), &[n])?, 0)?,
        None => made,
    };
    let all: Sizes = leading.iter().copied().chain([m, outputs]).collect();
    Ok(made.reshape(&all)?)
}

/// Returns the inverse permutation.
fn inverse(order: &[u32]) -> Vec<u32> {
    let mut places = vec![0; order.len()];
    for (place, &row) in (0..).zip(order) {
        places[row as usize] = place;
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_weight_lie_together() {
        let groups = Groups::new(&[2, 0, 2, 1, 0]);
        assert_eq!(groups.weights, [(0, 2), (1, 1), (2, 2)]);
        let order = groups.order.unwrap();
        assert_eq!(order, [1, 4, 3, 0, 2]);
        assert_eq!(inverse(&order), [3, 0, 4, 2, 1]);
        let sorted = Groups::new(&[0, 0, 3]);
        assert_eq!(sorted, Groups { order: None, weights: vec![(0, 2), (3, 1)] });
    }
}
