//! Rows by index: the embedding.

use mlx_rs::Array;

use super::instruction;
use super::shape::normalize_axis;
use crate::error::{fail, Result};
use crate::program::fb;
use crate::program::frame::Frame;
use crate::program::ir::{Index, Instruction, Int, Op, Value};
use crate::program::slots::Slots;

pub fn take(slots: &mut Slots, node: fb::TakeNode) -> Result<Instruction> {
    let argument = node.index();
    let index = match (argument.kind(), argument.vid(), argument.tid()) {
        (0, _, _) => Index::One(Int::Literal(argument.literal())),
        (1, Some(vid), _) => Index::One(Int::Value(slots.read_int(vid)?)),
        (2, _, Some(tid)) => Index::Many(slots.read(tid)?),
        (kind, _, _) => fail!(Program, "an index of kind {kind}"),
    };
    let op = Op::Take { x: slots.read(node.x())?, index, axis: node.axis() };
    Ok(instruction(op, slots.write(node.out())?))
}

pub fn run_take(frame: &Frame, x: Value, index: Index, axis: i32) -> Result<Array> {
    let x = frame.tensor(x)?;
    let axis = normalize_axis(axis, x.ndim())? as i32;
    let size = x.dim(axis);
    match index {
        Index::Many(index) => {
            check_range(frame, index, size)?;
            Ok(x.take_axis(frame.tensor(index)?, axis)?)
        }
        Index::One(index) => {
            let index = frame.int(index)?;
            if index < -size || index >= size {
                fail!(Program, "index {index} of an axis of {size}");
            }
            let index = if index < 0 { index + size } else { index };
            Ok(x.take_axis(Array::from_int(index), axis)?)
        }
    }
}

/// `[...]` indices into `x`, `[features, rows]`: `[..., features]`.
pub fn run_take_transposed(frame: &Frame, x: Value, index: Value) -> Result<Array> {
    let x = frame.tensor(x)?;
    check_range(frame, index, x.dim(1))?;
    let columns = x.take_axis(frame.tensor(index)?, 1)?;
    let mut perm: Vec<i32> = (1..columns.ndim() as i32).collect();
    perm.push(0);
    Ok(columns.transpose_axes(&perm)?)
}

/// MLX reads whatever lies at an index past the end. Where the indices are an
/// input, such as tokens, they are here to look at.
fn check_range(frame: &Frame, index: Value, size: i32) -> Result<()> {
    let Some(indices) = frame.host_ints(index) else {
        return Ok(());
    };
    match indices.iter().find(|&&index| index < 0 || index >= i64::from(size)) {
        None => Ok(()),
        Some(index) => fail!(
            InvalidArgument,
            "an index (of a token, say) is {index}, it may be 0 to {}",
            size - 1
        ),
    }
}
