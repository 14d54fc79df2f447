//! Activations, and their products with another tensor, as one kernel launch on a GPU.

use std::sync::LazyLock;

use mlx_rs::Array;

use super::compiled;
use crate::error::{fail, Result};
use crate::ir::{Binary, Expression, Node, Unary};
use crate::ops::frame::Frame;

/// Compiled activations, without and with a product.
static ACTIVATIONS: LazyLock<[(Unary, [Expression; 2]); 3]> = LazyLock::new(|| {
    [Unary::Silu, Unary::Gelu, Unary::GeluTanh].map(|function| {
        let alone = vec![Node::Input(0), Node::Unary(function, 0)];
        let mut product = alone.clone();
        product.extend([Node::Input(1), Node::Binary(Binary::Multiply, 1, 2)]);
        (function, [alone, product].map(|nodes| Expression { nodes }))
    })
});

/// Returns the function of `x`, times `by` if there is one.
pub fn run(frame: &Frame, function: Unary, x: &Array, by: Option<&Array>) -> Result<Array> {
    let Some((_, [alone, product])) = ACTIVATIONS.iter().find(|(known, _)| *known == function)
    else {
        fail!(Internal, "expected an activation, got {function:?}");
    };
    match by {
        Some(by) => compiled::run(frame.on_gpu(), product, &[x, by]),
        None => compiled::run(frame.on_gpu(), alone, &[x]),
    }
}
