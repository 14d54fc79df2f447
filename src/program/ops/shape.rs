//! Views and shapes.

use mlx_rs::ops::concatenate as mlx_concatenate;
use mlx_rs::Array;

use super::{instruction, ints};
use crate::error::{fail, Result};
use crate::mlx::slice_axis;
use crate::program::fb;
use crate::program::frame::Frame;
use crate::program::ir::{Instruction, Int, Op, Value};
use crate::program::slots::Slots;

/// The axis of tokens in `[1, T, ...]`.
const TOKENS: usize = 1;

pub fn expand_dims(slots: &mut Slots, node: fb::ExpandDimsNode) -> Result<Instruction> {
    let op = Op::ExpandDims { x: slots.read(node.x())?, axis: node.axis() };
    Ok(instruction(op, slots.write(node.out())?))
}

pub fn reshape(slots: &mut Slots, node: fb::ReshapeNode) -> Result<Instruction> {
    let op = Op::Reshape { x: slots.read(node.x())?, shape: ints(slots, node.shape())? };
    Ok(instruction(op, slots.write(node.out())?))
}

pub fn transpose(slots: &mut Slots, node: fb::TransposeNode) -> Result<Instruction> {
    let op = Op::Transpose { x: slots.read(node.x())?, perm: node.perm().iter().collect() };
    Ok(instruction(op, slots.write(node.out())?))
}

pub fn slice(slots: &mut Slots, node: fb::SliceNode) -> Result<Instruction> {
    let op = Op::Slice {
        x: slots.read(node.x())?,
        axis: slots.int(node.axis())?,
        start: slots.int(node.start())?,
        stop: slots.int(node.stop())?,
        step: node.step(),
    };
    Ok(instruction(op, slots.write(node.out())?))
}

pub fn concatenate(slots: &mut Slots, node: fb::ConcatenateNode) -> Result<Instruction> {
    let tensors = node.tensors().iter().map(|tid| slots.read(tid)).collect::<Result<Vec<_>>>()?;
    let op = Op::Concatenate { tensors, axis: node.axis() };
    Ok(instruction(op, slots.write(node.out())?))
}

pub fn sym_size(slots: &mut Slots, node: fb::SymSizeNode) -> Result<Instruction> {
    let op = Op::SymSize { x: slots.read(node.a())?, dim: node.dim() };
    Ok(instruction(op, slots.write_int(node.out())?))
}

pub fn run_reshape(frame: &Frame, x: Value, shape: &[Int]) -> Result<Array> {
    let shape = shape.iter().map(|&dim| frame.int(dim)).collect::<Result<Vec<_>>>()?;
    let x = frame.tensor(x)?;
    let open = shape.iter().filter(|&&dim| dim == -1).count();
    let product = shape
        .iter()
        .filter(|&&dim| dim != -1)
        .try_fold(1usize, |product, &dim| product.checked_mul(usize::try_from(dim).ok()?));
    let fits = match (product, open) {
        (Some(product), 0) => product == x.size(),
        (Some(product), 1) => product != 0 && x.size() % product == 0,
        _ => false,
    };
    if !fits {
        fail!(Program, "a tensor of shape {:?} cannot have shape {shape:?}", x.shape());
    }
    Ok(x.reshape(&shape)?)
}

/// Python's slice along one axis: bounds below zero count from the end, and are
/// brought within the axis.
pub fn run_slice(
    frame: &Frame,
    x: Value,
    axis: Int,
    [start, stop]: [Int; 2],
    step: i32,
) -> Result<Array> {
    let x = frame.tensor(x)?;
    let axis = normalize_axis(frame.int(axis)?, x.ndim())?;
    if step < 1 {
        fail!(Unsupported, "a slice with step {step}");
    }
    let size = x.dim(axis as i32);
    let bound = |bound: i32| {
        if bound < 0 {
            bound.saturating_add(size).max(0)
        } else {
            bound.min(size)
        }
    };
    let start = bound(frame.int(start)?);
    let stop = bound(frame.int(stop)?).max(start);
    slice_axis(x, axis, start, stop, step)
}

pub fn run_concatenate(frame: &Frame, tensors: &[Value], axis: i32) -> Result<Array> {
    let tensors = tensors.iter().map(|&value| frame.tensor(value)).collect::<Result<Vec<_>>>()?;
    Ok(mlx_concatenate(&tensors, axis)?)
}

pub fn run_sym_size(x: &Array, dim: i32) -> Result<i32> {
    let axis = normalize_axis(dim, x.ndim())?;
    Ok(x.dim(axis as i32))
}

pub fn run_last_token(x: &Array) -> Result<Array> {
    if x.ndim() <= TOKENS {
        fail!(Program, "a tensor of shape {:?} has no axis of tokens", x.shape());
    }
    let n = x.dim(TOKENS as i32);
    slice_axis(x, TOKENS, (n - 1).max(0), n, 1)
}

/// An axis counted from the front; below zero it counts from the end.
pub fn normalize_axis(axis: i32, ndim: usize) -> Result<usize> {
    let n = ndim as i32;
    if axis < -n || axis >= n {
        fail!(Program, "axis {axis} of a tensor with {ndim} axes");
    }
    Ok(if axis < 0 { axis + n } else { axis } as usize)
}
