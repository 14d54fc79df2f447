//! Normalisation.

use mlx_rs::{Array, Dtype};

use super::instruction;
use crate::error::Result;
use crate::fb;
use crate::ir::{Instruction, Norm, Op, Value};
use crate::ops::frame::Frame;
use crate::ops::slots::Slots;
use etkv::kernels;
use etkv::mlx::cast;

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
    Ok(mlx_rs::fast::rms_norm(frame.tensor(x)?, frame.optional(weight)?, eps)?)
}

pub fn run_layer_norm(
    frame: &Frame,
    x: Value,
    weight: Option<Value>,
    bias: Option<Value>,
    eps: f32,
) -> Result<Array> {
    let (weight, bias) = (frame.optional(weight)?, frame.optional(bias)?);
    Ok(mlx_rs::fast::layer_norm(frame.tensor(x)?, weight, bias, eps)?)
}

/// Returns the norm of `x`, computed in float32, times the single element of `scale`, in `dtype`.
pub fn run_in_float32(
    frame: &Frame,
    x: Value,
    norm: Norm,
    scale: Option<Value>,
    dtype: Dtype,
) -> Result<Array> {
    let (weight, scale) = (frame.optional(norm.weight)?, frame.optional(scale)?);
    in_float32(frame.tensor(x)?, weight, scale, norm.eps, dtype)
}

/// As [`run_in_float32`].
pub fn in_float32(
    x: &Array,
    weight: Option<&Array>,
    scale: Option<&Array>,
    eps: f32,
    dtype: Dtype,
) -> Result<Array> {
    let call = kernels::Norm { x, weight, scale, eps, dtype };
    if let Some(out) = kernels::norm(&call)? {
        return Ok(out);
    }
    let weight = weight.map(|weight| cast(weight, Dtype::Float32)).transpose()?;
    let x = cast(x, Dtype::Float32)?;
    let normalized = mlx_rs::fast::rms_norm(&x, weight.as_ref(), eps)?;
    match scale {
        Some(scale) => cast(&normalized.multiply(scale)?, dtype),
        None => cast(&normalized, dtype),
    }
}
