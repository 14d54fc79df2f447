//! Normalisation.

use mlx_rs::Array;

use super::instruction;
use crate::error::Result;
use crate::fb;
use crate::ir::{Instruction, Op, Value};
use crate::ops::frame::Frame;
use crate::ops::slots::Slots;

pub fn rms_norm(slots: &mut Slots, node: fb::RMSNormNode) -> Result<Instruction> {
    let op = Op::RmsNorm {
        x: slots.read(node.x())?,
        weight: slots.read_optional(node.weight())?,
        eps: node.eps(),
    };
    Ok(instruction(op, slots.write(node.out())?))
}

pub fn layer_norm(slots: &mut Slots, node: fb::LayerNormNode) -> Result<Instruction> {
    let op = Op::LayerNorm {
        x: slots.read(node.x())?,
        weight: slots.read_optional(node.weight())?,
        bias: slots.read_optional(node.bias())?,
        eps: node.eps(),
    };
    Ok(instruction(op, slots.write(node.out())?))
}

pub fn run_rms_norm(frame: &Frame, x: Value, weight: Option<Value>, eps: f32) -> Result<Array> {
    let weight = weight.map(|weight| frame.tensor(weight)).transpose()?;
    Ok(mlx_rs::fast::rms_norm(frame.tensor(x)?, weight, eps)?)
}

pub fn run_layer_norm(
    frame: &Frame,
    x: Value,
    weight: Option<Value>,
    bias: Option<Value>,
    eps: f32,
) -> Result<Array> {
    let weight = weight.map(|weight| frame.tensor(weight)).transpose()?;
    let bias = bias.map(|bias| frame.tensor(bias)).transpose()?;
    Ok(mlx_rs::fast::layer_norm(frame.tensor(x)?, weight, bias, eps)?)
}
