//! Normalisation.

use mlx_rs::Array;

use super::instruction;
use crate::error::Result;
use crate::program::decode::Decoder;
use crate::program::fb;
use crate::program::interpreter::Frame;
use crate::program::ir::{Instruction, Op, Value};

pub fn rms_norm(decoder: &mut Decoder, node: fb::RMSNormNode) -> Result<Instruction> {
    let op = Op::RmsNorm {
        x: decoder.read(node.x())?,
        weight: decoder.read_optional(node.weight())?,
        eps: node.eps(),
    };
    Ok(instruction(op, decoder.write(node.out())?))
}

pub fn run_rms_norm(frame: &Frame, x: Value, weight: Option<Value>, eps: f32) -> Result<Array> {
    let weight = weight.map(|weight| frame.tensor(weight)).transpose()?;
    Ok(mlx_rs::fast::rms_norm(frame.tensor(x)?, weight, eps)?)
}
