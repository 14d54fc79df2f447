//! A product whose features are the heads of queries, keys and values. Some heads rotate.

use mlx_rs::Array;

use super::linear::{by_kernel, linear, KernelResult};
use super::rotary::rotary;
use super::views::{reshape_transpose, run_split, Pieces};
use crate::error::{fail, Result};
use crate::ir::Heads;
use crate::ops::frame::Frame;
use etkv::kernels::{Product, Rotation};
use etkv::mlx::cast;

/// The axis of heads in `[1, heads, T, head_dim]`.
const HEADS: i32 = 1;

/// Computes the product, and returns the pieces of its heads. A single kernel does all of this if it supports the
/// product.
pub fn run(frame: &Frame, product: Product, heads: &Heads) -> Result<Pieces> {
    let (positions, periods) = (frame.tensor(heads.offsets)?, frame.tensor(heads.periods)?);
    let rotation = Rotation { positions, periods, heads: heads.rotated };
    let product =
        Product { rotation: (product.x.dtype() == heads.dtype).then_some(rotation), ..product };
    let shape = [1, frame.int(heads.tokens)?, heads.n, heads.head_dim];
    let viewed = |product: &Array| reshape_transpose(product, &shape, &[0, 2, 1, 3]);
    let split = |x: &Array, at: &[i32], n: i32| run_split(x, HEADS, at, &(n..=n));
    let out = match by_kernel(&product)? {
        KernelResult::Complete(out) if product.rotation.is_some() => {
            return split(&out.transpose_axes(&[0, 2, 1, 3])?, &heads.at, heads.n)
        }
        KernelResult::Complete(out) => out,
        KernelResult::Remaining(normalized) => {
            let x = normalized.as_ref().unwrap_or(product.x);
            linear(&Product { x, norm: None, rotation: None, ..product })?
        }
    };
    let mut all = split(&viewed(&out)?, &[heads.rotated], heads.n)?;
    let still = all.pop();
    let [rotated] = &all[..] else {
        fail!(
            Internal,
            "expected a part of the heads to rotate, got {} of {}",
            heads.rotated,
            heads.n
        );
    };
    let rotated = cast(&rotary(rotated, positions, periods)?, heads.dtype)?;
    // The boundaries between heads that rotate. Heads that do not rotate come after them.
    let inside = heads.at.partition_point(|&at| at < heads.rotated);
    let mut pieces = split(&rotated, &heads.at[..inside], heads.rotated)?;
    if let Some(still) = &still {
        let after: Vec<i32> = heads.at[inside + 1..].iter().map(|at| at - heads.rotated).collect();
        pieces.extend(split(still, &after, heads.n - heads.rotated)?);
    }
    Ok(pieces)
}
