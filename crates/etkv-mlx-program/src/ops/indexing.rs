//! Embedding: rows by index.

use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::instruction;
use super::shape::normalize_axis;
use crate::dtype::{self, is_float};
use crate::error::{fail, Error, Result, Status};
use crate::fb;
use crate::ir::{Index, Instruction, Int, Op, Value};
use crate::ops::frame::Frame;
use crate::ops::slots::Slots;

pub fn take(slots: &mut Slots, node: fb::TakeNode) -> Result<Instruction> {
    let argument = node.index();
    let index = match (argument.kind(), argument.vid(), argument.tid()) {
        (0, _, _) => Index::One(Int::Literal(argument.literal())),
        (1, Some(vid), _) => Index::One(Int::Value(slots.read_int(vid)?)),
        (2, _, Some(tid)) => Index::Many(slots.read(tid)?),
        (kind, _, _) => fail!(Program, "expected an index of kind 0, 1 or 2, got {kind}"),
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
                fail!(Program, "expected an index from {} to {}, got {index}", -size, size - 1);
            }
            let index = if index < 0 { index + size } else { index };
            Ok(x.take_axis(Array::from_int(index), axis)?)
        }
    }
}

/// Gathers columns of `x`, `[features, rows]`, by indices `[...]`. The result is `[..., features]`.
pub fn run_take_transposed(frame: &Frame, x: Value, index: Value) -> Result<Array> {
    let x = frame.tensor(x)?;
    check_range(frame, index, x.dim(1))?;
    let columns = x.take_axis(frame.tensor(index)?, 1)?;
    let mut perm: Vec<i32> = (1..columns.ndim() as i32).collect();
    perm.push(0);
    Ok(columns.transpose_axes(&perm)?)
}

/// Checks indices, because MLX does not check an index past the end. Indices that are an input, such as tokens, are
/// on the host. For other indices this waits until they are computed.
pub fn check_range(frame: &Frame, index: Value, size: i32) -> Result<()> {
    check_between(frame, index, 0, size)
}

/// Checks indices of an axis of `size` elements. Negative ones count from the end.
pub fn check_indices(frame: &Frame, index: Value, size: i32) -> Result<()> {
    check_between(frame, index, -size, size)
}

/// Returns indices after the check of [`check_range`].
pub fn read_range(frame: &Frame, index: Value, size: i32) -> Result<Vec<i32>> {
    check_range(frame, index, size)?;
    Ok(frame.numbers(index)?.iter().map(|&index| index as i32).collect())
}

fn check_between(frame: &Frame, index: Value, begin: i32, size: i32) -> Result<()> {
    if frame.limit(index).is_some_and(|limit| limit <= size) {
        return Ok(());
    }
    let dtype = frame.tensor(index)?.dtype();
    let is_float = is_float(dtype) || matches!(dtype, Dtype::Float64 | Dtype::Complex64);
    if dtype == Dtype::Bool || is_float {
        fail!(Program, "expected indices of an integer dtype, got {}", dtype::name(dtype));
    }
    let (least, most) = match frame.host_ints(index) {
        Some(indices) => (indices.iter().min().copied(), indices.iter().max().copied()),
        None => {
            let indices = frame.tensor(index)?.as_dtype(Dtype::Int64)?;
            if indices.size() == 0 {
                return Ok(());
            }
            let one = |array: Array| -> Result<Option<i64>> {
                let number = array.try_item_exact::<i64>();
                number
                    .map(Some)
                    .map_err(|error| Error::new(Status::Backend, &error).caused_by(error))
            };
            let (least, most) = (indices.min(None)?, indices.max(None)?);
            // Both bounds are computed with one wait.
            eval([&least, &most])?;
            (one(least)?, one(most)?)
        }
    };
    for index in [least, most].into_iter().flatten() {
        if index < i64::from(begin) || index >= i64::from(size) {
            fail!(
                InvalidArgument,
                "expected an index (such as a token id) from {begin} to {}, got {index}",
                size - 1
            );
        }
    }
    Ok(())
}
