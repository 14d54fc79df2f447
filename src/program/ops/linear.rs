//! Matrix products of floats.

use mlx_rs::ops::{addmm as mlx_addmm, matmul};
use mlx_rs::Array;

use super::instruction;
use crate::error::{fail, Result};
use crate::program::fb;
use crate::program::frame::Frame;
use crate::program::ir::{Instruction, Op, Value};
use crate::program::slots::Slots;

pub fn addmm(slots: &mut Slots, node: fb::AddmmNode) -> Result<Instruction> {
    let op = Op::Addmm {
        mat1: slots.read(node.mat1())?,
        mat2: slots.read(node.mat2())?,
        bias: slots.read_optional(node.bias())?,
        alpha: node.alpha(),
        beta: node.beta(),
    };
    if node.bias().is_none() && node.alpha() != 1.0 {
        fail!(Unsupported, "expected alpha 1 for Addmm without a bias, got {}", node.alpha());
    }
    Ok(instruction(op, slots.write(node.out())?))
}

pub fn run_addmm(
    frame: &Frame,
    [mat1, mat2]: [Value; 2],
    bias: Option<Value>,
    alpha: f32,
    beta: f32,
) -> Result<Array> {
    let (mat1, mat2) = (frame.tensor(mat1)?, frame.tensor(mat2)?);
    let bias = bias.map(|bias| frame.tensor(bias)).transpose()?;
    product(mat1, mat2, bias, alpha, beta)
}

/// Multiplies `x` by `weight`, which is `[in, out]` if `transposed`, else `[out, in]`.
pub fn run_linear(
    frame: &Frame,
    x: Value,
    weight: Value,
    bias: Option<Value>,
    transposed: bool,
) -> Result<Array> {
    let (x, weight) = (frame.tensor(x)?, frame.tensor(weight)?);
    let bias = bias.map(|bias| frame.tensor(bias)).transpose()?;
    if transposed {
        product(x, weight, bias, 1.0, 1.0)
    } else {
        product(x, &weight.transpose_axes(&[1, 0])?, bias, 1.0, 1.0)
    }
}

fn product(
    mat1: &Array,
    mat2: &Array,
    bias: Option<&Array>,
    alpha: f32,
    beta: f32,
) -> Result<Array> {
    Ok(match bias {
        None => matmul(mat1, mat2)?,
        Some(bias) => mlx_addmm(bias, mat1, mat2, alpha, beta)?,
    })
}
