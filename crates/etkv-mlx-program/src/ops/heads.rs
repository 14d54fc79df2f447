//! A product whose features are the heads of queries, keys and values. Some heads rotate.

use mlx_rs::Array;

use super::linear::{by_kernel, linear, KernelResult};
use super::rotary::rotary;
use super::views::{reshape_transpose, run_split, Pieces};
use crate::error::{fail, Result};
use crate::ir::{Heads, Norm, Value};
use crate::ops::frame::Frame;
use etkv::kernels::{Product, RmsNorm, Rotation};
use etkv::mlx::cast;

/// The axis of heads in `[1, heads, T, head_dim]`.
const HEADS: i32 = 1;

/// A product, and the norm of its input rows.
pub struct Layer {
    pub x: Value,
    pub weight: Value,
    pub bias: Option<Value>,
    pub norm: Option<Norm>,
}

/// Computes the product, and returns the pieces of its heads. A single kernel does all of this if it supports the
/// product.
pub fn run(frame: &Frame, layer: &Layer, transposed: bool, heads: &Heads) -> Result<Pieces> {
    let tensor = |value: Option<Value>| value.map(|value| frame.tensor(value)).transpose();
    let (x, weight) = (frame.tensor(layer.x)?, frame.tensor(layer.weight)?);
    let (positions, periods) = (frame.tensor(heads.offsets)?, frame.tensor(heads.periods)?);
    let norm = match layer.norm {
        Some(Norm { weight, eps, in_float32 }) => {
            Some(RmsNorm { weight: tensor(weight)?, eps, in_float32 })
        }
        None => None,
    };
    let rotation = Rotation { positions, periods, heads: heads.rotated };
    let product = Product {
        bias: tensor(layer.bias)?,
        norm,
        rotation: (x.dtype() == heads.dtype).then_some(rotation),
        ..Product::plain(x, weight, transposed)
    };
    let shape = [1, frame.int(heads.tokens)?, heads.n, heads.head_dim];
    let viewed = |product: &Array| reshape_transpose(product, &shape, &[0, 2, 1, 3]);
    let split = |x: &Array, at: &[i32], n: i32| run_split(x, HEADS, at, &(n..=n));
    let out = match by_kernel(&product)? {
        KernelResult::Complete(out) if product.rotation.is_some() => {
            return split(&out.transpose_axes(&[0, 2, 1, 3])?, &heads.at, heads.n)
        }
        KernelResult::Complete(out) => out,
        KernelResult::Remaining(normalized) => {
            let x = normalized.as_ref().unwrap_or(x);
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
