//! The choice between MLX's two attention implementations on a GPU, for calls that [the kernel](crate::kernels) does
//! not support: few rows, rows of odd sizes, and masks that differ between heads.
//!
//! In half precision MLX 0.32.2 passes attention of several queries to cuDNN. cuDNN makes a plan for each pair of query
//! and key length. On an H200, making a plan takes 37 to 58 ms, once in each thread. The call itself takes 0.05 ms. The
//! length of a cache changes at every step. In float32, MLX composes attention from its matrix products, without plans.
//! This takes 0.05 to 0.15 ms for up to 16 queries over 1,500 keys, and 0.43 ms for 512 queries. The result is as exact
//! as that of cuDNN.

use std::cell::RefCell;
use std::collections::HashMap;

use mlx_rs::{Array, Dtype};

use super::Mask;
use crate::error::Result;
use crate::mlx;

/// The maximum number of bytes of scores that MLX's composed attention may hold. With this many scores, composed
/// attention takes as long as making a plan.
const MAX_SCORES: u64 = 512 << 20;

/// After this number of calls without a plan, their extra time equals the time of making the plan.
const CALLS: u32 = 128;

/// Lengths that are multiples of this number recur, because prompts are read in steps of such sizes.
const STEP: i32 = 256;

/// The maximum number of shapes that are counted.
const MAX_COUNTED: usize = 256;

/// Shapes of queries and keys.
type Shapes = [i32; 5];

thread_local! {
    /// The number of calls of this thread with each shape. MLX's plans belong to a thread too.
    static COUNTED: RefCell<HashMap<Shapes, u32>> = RefCell::default();
}

/// Returns the dtype in which MLX computes attention fastest, assuming that few lengths recur.
pub fn dtype_for(q: &Array, k: &Array, mask: &Mask) -> Result<Dtype> {
    let dtype = q.dtype();
    let (heads, n_queries, n_keys) = (q.dim(1), q.dim(2), k.dim(2));
    if n_queries == 1 || dtype == Dtype::Float32 || !mlx::on_gpu()? {
        return Ok(dtype);
    }
    let size = |n: i32| u64::from(n.unsigned_abs());
    let scores = size(heads).saturating_mul(size(n_queries)).saturating_mul(size(n_keys));
    if scores.saturating_mul(4) > MAX_SCORES {
        return Ok(dtype);
    }
    let recurs = n_queries % STEP == 0 && n_keys % STEP == 0 && !matches!(mask, Mask::Explicit(_));
    let planned = recurs && is_worth_a_plan([heads, n_queries, q.dim(3), k.dim(1), n_keys]);
    Ok(if planned { dtype } else { Dtype::Float32 })
}

/// Counts a call and returns whether to make a plan. The plan is made once the calls without it have lost as much time
/// as making the plan takes. The total time is then at most twice the optimum.
fn is_worth_a_plan(shapes: Shapes) -> bool {
    COUNTED.with_borrow_mut(|counted| {
        if counted.len() >= MAX_COUNTED && !counted.contains_key(&shapes) {
            counted.clear();
        }
        let calls = counted.entry(shapes).or_default();
        *calls = calls.saturating_add(1);
        *calls > CALLS
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_is_planned_once_it_came_often() {
        let shape = |n: i32| [32, 512, 64, 8, n];
        for _ in 0..CALLS {
            assert!(!is_worth_a_plan(shape(512)));
        }
        assert!(is_worth_a_plan(shape(512)));
        assert!(!is_worth_a_plan(shape(1024)));
        for n in 0..2 * MAX_COUNTED as i32 {
            is_worth_a_plan(shape(n));
        }
        COUNTED.with_borrow(|counted| assert!(counted.len() <= MAX_COUNTED));
    }
}
