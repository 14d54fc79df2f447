//! Reading and writing elements by index.

use mlx_rs::Array;

use super::calls::{decode, normalize_axis, Arguments};
use super::indexing::{check_indices, check_range};
use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Function, Instruction};
use crate::ops::slots::Slots;
use etkv::mlx::{call, slice_axis, update_axis, Arrays};

pub fn gather(slots: &mut Slots, node: fb::GatherNode) -> Result<Instruction> {
    let (n, n_axes) = (node.indices().len(), node.axes().len());
    if n != n_axes {
        fail!(Program, "expected indices of {n_axes} axes, got {n}");
    }
    let function = Function::Gather {
        axes: node.axes().iter().collect(),
        slice_sizes: node.slice_sizes().iter().collect(),
    };
    let tensors: Vec<_> = std::iter::once(node.x()).chain(node.indices().iter()).collect();
    decode(slots, function, &tensors, Vec::new(), node.out())
}

pub fn index_copy(slots: &mut Slots, node: fb::IndexCopyNode) -> Result<Instruction> {
    let tensors = [node.dst(), node.update(), node.indices()];
    let function = Function::IndexCopy { axis: node.axis() };
    decode(slots, function, &tensors, Vec::new(), node.out())
}

pub fn scatter_add(slots: &mut Slots, node: fb::ScatterAddNode) -> Result<Instruction> {
    let tensors = [node.x(), node.indices(), node.updates()];
    let function = Function::ScatterAdd { axis: node.axis() };
    decode(slots, function, &tensors, Vec::new(), node.out())
}

pub fn slice_update(slots: &mut Slots, node: fb::SliceUpdateNode) -> Result<Instruction> {
    if node.step() < 1 {
        fail!(Program, "expected a slice with a step of at least 1, got {}", node.step());
    }
    let ints = vec![slots.int(node.axis())?, slots.int(node.start())?, slots.int(node.stop())?];
    let function = Function::SliceUpdate { step: node.step() };
    decode(slots, function, &[node.dst(), node.update()], ints, node.out())
}

pub fn take_along_axis(slots: &mut Slots, node: fb::TakeAlongAxisNode) -> Result<Instruction> {
    let function = Function::TakeAlongAxis { axis: node.axis() };
    decode(slots, function, &[node.x(), node.indices()], Vec::new(), node.out())
}

pub fn run_gather(arguments: &Arguments, axes: &[i32], slice_sizes: &[i32]) -> Result<Array> {
    let x = arguments.tensor(0)?;
    let fits = slice_sizes.len() == x.ndim()
        && slice_sizes.iter().zip(x.shape()).all(|(slice, size)| (0..=*size).contains(slice));
    if !fits {
        fail!(Program, "cannot gather slices of {slice_sizes:?} from {:?}", x.shape());
    }
    for (index, &axis) in axes.iter().enumerate() {
        if !(0..x.ndim() as i32).contains(&axis) {
            fail!(Program, "expected an axis from 0 to {}, got {axis}", x.ndim() as i32 - 1);
        }
        // A slice starts at its index. MLX counts a negative index from the end of the axis, so the slice could run
        // past the end.
        let (frame, value) = (arguments.frame, arguments.values[index + 1]);
        match slice_sizes[axis as usize] {
            ..=1 => check_indices(frame, value, x.dim(axis))?,
            slice => check_range(frame, value, x.dim(axis) - slice + 1)?,
        }
    }
    let indices = Arrays::of(arguments.tensors[1..].iter().copied());
    // SAFETY: the lists have the given lengths, and each slice lies within the array.
    call(|made, stream| unsafe {
        mlx_sys::mlx_gather(
            made,
            x.as_ptr(),
            indices.as_raw(),
            axes.as_ptr(),
            axes.len(),
            slice_sizes.as_ptr(),
            slice_sizes.len(),
            stream,
        )
    })
}

/// Copies the rows of an update to the indices. Consecutive indices are copied at once.
pub fn run_index_copy(arguments: &Arguments, axis: i32) -> Result<Array> {
    let (dst, update) = (arguments.tensor(0)?, arguments.tensor(1)?);
    let axis = normalize_axis(axis, dst.ndim())?;
    let size = i64::from(dst.dim(axis as i32));
    let indices = arguments.tensor(2)?;
    if indices.ndim() != 1 {
        fail!(Program, "expected indices of one axis, got shape {:?}", indices.shape());
    }
    if update.ndim() != dst.ndim() || i64::from(update.dim(axis as i32)) != indices.size() as i64 {
        fail!(
            Program,
            "cannot copy {:?} to {} indices along axis {axis} of {:?}",
            update.shape(),
            indices.size(),
            dst.shape()
        );
    }
    let numbers = arguments.frame.numbers(arguments.values[2])?;
    let mut places = Vec::with_capacity(numbers.len());
    for &number in numbers.iter() {
        if number < -size || number >= size {
            fail!(
                InvalidArgument,
                "expected an index from {} to {}, got {number}",
                -size,
                size - 1
            );
        }
        places.push(if number < 0 { number + size } else { number } as i32);
    }
    let mut made = dst.clone();
    let mut from = 0;
    while from < places.len() {
        let run =
            (from..places.len()).take_while(|&at| places[at] == places[from] + (at - from) as i32);
        let n = run.count();
        let rows = slice_axis(update, axis, from as i32, (from + n) as i32, 1)?;
        made = update_axis(&made, &rows, axis, places[from], places[from] + n as i32)?;
        from += n;
    }
    Ok(made)
}

pub fn run_scatter_add(arguments: &Arguments, axis: i32) -> Result<Array> {
    let (x, indices, updates) = (arguments.tensor(0)?, arguments.tensor(1)?, arguments.tensor(2)?);
    let axis = normalize_axis(axis, x.ndim())? as i32;
    check_indices(arguments.frame, arguments.values[1], x.dim(axis))?;
    check_along_axis(x, indices, axis)?;
    let (x, indices, updates) = (x.as_ptr(), indices.as_ptr(), updates.as_ptr());
    // SAFETY: the arrays are live, and each index lies within the axis.
    call(|made, stream| unsafe {
        mlx_sys::mlx_scatter_add_axis(made, x, indices, updates, axis, stream)
    })
}

pub fn run_slice_update(arguments: &Arguments, step: i32) -> Result<Array> {
    let (dst, update) = (arguments.tensor(0)?, arguments.tensor(1)?);
    let axis = normalize_axis(arguments.int(0)?, dst.ndim())?;
    let size = dst.dim(axis as i32);
    let bound = |bound: i32| match bound {
        ..0 => bound.saturating_add(size).max(0),
        _ => bound.min(size),
    };
    let (start, stop) = (bound(arguments.int(1)?), bound(arguments.int(2)?));
    if start >= stop {
        return Ok(dst.clone());
    }
    if step == 1 {
        return update_axis(dst, update, axis, start, stop);
    }
    let mut from = vec![0; dst.ndim()];
    let mut to = dst.shape().to_vec();
    let mut by = vec![1; dst.ndim()];
    (from[axis], to[axis], by[axis]) = (start, stop, step);
    let n = from.len();
    // SAFETY: the lists have the given lengths.
    call(|made, stream| unsafe {
        mlx_sys::mlx_slice_update(
            made,
            dst.as_ptr(),
            update.as_ptr(),
            from.as_ptr(),
            n,
            to.as_ptr(),
            n,
            by.as_ptr(),
            n,
            stream,
        )
    })
}

pub fn run_take_along_axis(arguments: &Arguments, axis: i32) -> Result<Array> {
    let (x, indices) = (arguments.tensor(0)?, arguments.tensor(1)?);
    let axis = normalize_axis(axis, x.ndim())? as i32;
    check_indices(arguments.frame, arguments.values[1], x.dim(axis))?;
    check_along_axis(x, indices, axis)?;
    // SAFETY: the arrays are live, and each index lies within the axis.
    call(|made, stream| unsafe {
        mlx_sys::mlx_take_along_axis(made, x.as_ptr(), indices.as_ptr(), axis, stream)
    })
}

/// Checks that on every axis other than `axis` the indices have the same number of elements as `x`, or one element.
fn check_along_axis(x: &Array, indices: &Array, axis: i32) -> Result<()> {
    let fits = indices.ndim() == x.ndim()
        && (0..x.ndim() as i32).all(|other| {
            other == axis
                || indices.dim(other) == x.dim(other)
                || indices.dim(other) == 1
                || x.dim(other) == 1
        });
    if !fits {
        fail!(Program, "cannot use indices of shape {:?} with {:?}", indices.shape(), x.shape());
    }
    Ok(())
}
