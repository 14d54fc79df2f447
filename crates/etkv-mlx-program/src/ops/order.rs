//! Order along an axis.

use mlx_rs::{Array, Dtype};

use super::calls::{decode, normalize_axis, Arguments};
use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Function, Instruction};
use crate::ops::slots::Slots;
use etkv::mlx::{call, cast};

pub fn sort(slots: &mut Slots, node: fb::SortNode) -> Result<Instruction> {
    decode(slots, Function::Sort { axis: node.axis() }, &[node.x()], Vec::new(), node.out())
}

pub fn argsort(slots: &mut Slots, node: fb::ArgsortNode) -> Result<Instruction> {
    decode(slots, Function::Argsort { axis: node.axis() }, &[node.x()], Vec::new(), node.out())
}

pub fn partition(slots: &mut Slots, node: fb::PartitionNode) -> Result<Instruction> {
    let kth = vec![slots.int(node.kth())?];
    decode(slots, Function::Partition { axis: node.axis() }, &[node.x()], kth, node.out())
}

pub fn argpartition(slots: &mut Slots, node: fb::ArgPartitionNode) -> Result<Instruction> {
    let kth = vec![slots.int(node.kth())?];
    decode(slots, Function::ArgPartition { axis: node.axis() }, &[node.x()], kth, node.out())
}

pub fn run_sort(function: &Function, arguments: &Arguments, axis: i32) -> Result<Array> {
    let x = arguments.tensor(0)?;
    let axis = normalize_axis(axis, x.ndim())? as i32;
    // MLX would divide by the number of elements of the axis, 0.
    if x.size() == 0 {
        return match function {
            Function::Sort { .. } => Ok(x.clone()),
            _ => cast(x, Dtype::Uint32),
        };
    }
    let work = match function {
        Function::Sort { .. } => mlx_sys::mlx_sort_axis,
        _ => mlx_sys::mlx_argsort_axis,
    };
    // SAFETY: the array is live.
    call(|made, stream| unsafe { work(made, x.as_ptr(), axis, stream) })
}

pub fn run_partition(function: &Function, arguments: &Arguments, axis: i32) -> Result<Array> {
    let (x, kth) = (arguments.tensor(0)?, arguments.int(0)?);
    let axis = normalize_axis(axis, x.ndim())? as i32;
    let size = x.dim(axis);
    if kth < -size || kth >= size {
        fail!(Program, "expected an index from {} to {}, got {kth}", -size, size - 1);
    }
    if x.size() == 0 {
        return match function {
            Function::Partition { .. } => Ok(x.clone()),
            _ => cast(x, Dtype::Uint32),
        };
    }
    let work = match function {
        Function::Partition { .. } => mlx_sys::mlx_partition_axis,
        _ => mlx_sys::mlx_argpartition_axis,
    };
    // SAFETY: the array is live.
    call(|made, stream| unsafe { work(made, x.as_ptr(), kth, axis, stream) })
}
