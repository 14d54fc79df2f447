//! Rearranging elements.

use std::collections::HashMap;

use mlx_rs::Array;
use smallvec::SmallVec;

use super::calls::{check_size, decode, normalize_axis, Arguments};
use super::ints;
use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Chain, Function, Instruction, Op, Out, PadMode, Value};
use crate::ops::slots::Slots;
use etkv::mlx::{call, Arrays};

pub fn as_strided(slots: &mut Slots, node: fb::AsStridedNode) -> Result<Instruction> {
    let (rank, n) = (node.shape().len(), node.strides().len());
    if rank != n {
        fail!(Program, "expected {rank} strides, got {n}");
    }
    let mut ints_of = ints(slots, node.shape())?;
    ints_of.extend(ints(slots, node.strides())?);
    let function = Function::AsStrided { offset: node.offset(), reduced: None };
    decode(slots, function, &[node.x()], ints_of, node.out())
}

pub fn broadcast_to(slots: &mut Slots, node: fb::BroadcastToNode) -> Result<Instruction> {
    let shape = ints(slots, node.shape())?;
    decode(slots, Function::BroadcastTo, &[node.x()], shape, node.out())
}

pub fn contiguous(slots: &mut Slots, node: fb::ContiguousNode) -> Result<Instruction> {
    decode(slots, Function::Contiguous, &[node.x()], Vec::new(), node.out())
}

pub fn flip(slots: &mut Slots, node: fb::FlipNode) -> Result<Instruction> {
    let function = Function::Flip { axes: node.axes().iter().collect() };
    decode(slots, function, &[node.x()], Vec::new(), node.out())
}

pub fn pad(slots: &mut Slots, node: fb::PadNode) -> Result<Instruction> {
    let mode = match node.mode() {
        "constant" => PadMode::Constant,
        "edge" => PadMode::Edge,
        other => fail!(Unsupported, "unknown Pad `{other}`; available: constant, edge"),
    };
    let width = ints(slots, node.pad_width())?;
    let function = Function::Pad { mode, value: node.constant_value() };
    decode(slots, function, &[node.x()], width, node.out())
}

pub fn repeat(slots: &mut Slots, node: fb::RepeatNode) -> Result<Instruction> {
    let repeats = vec![slots.int(node.repeats())?];
    decode(slots, Function::Repeat { axis: node.axis() }, &[node.x()], repeats, node.out())
}

pub fn roll(slots: &mut Slots, node: fb::RollNode) -> Result<Instruction> {
    let axes: Vec<i32> = node.axes().iter().collect();
    let shifts = ints(slots, node.shift())?;
    if axes.len() != shifts.len() {
        fail!(Program, "expected {} shifts, got {}", axes.len(), shifts.len());
    }
    decode(slots, Function::Roll { axes }, &[node.x()], shifts, node.out())
}

pub fn squeeze(slots: &mut Slots, node: fb::SqueezeNode) -> Result<Instruction> {
    let function = Function::Squeeze { dims: node.dims().into_iter().flatten().collect() };
    decode(slots, function, &[node.x()], Vec::new(), node.out())
}

pub fn stack(slots: &mut Slots, node: fb::StackNode) -> Result<Instruction> {
    let tensors: Vec<_> = node.tensors().iter().collect();
    decode(slots, Function::Stack { axis: node.axis() }, &tensors, Vec::new(), node.out())
}

pub fn tile(slots: &mut Slots, node: fb::TileNode) -> Result<Instruction> {
    let reps = ints(slots, node.reps())?;
    decode(slots, Function::Tile, &[node.x()], reps, node.out())
}

pub fn tril(slots: &mut Slots, node: fb::TrilNode) -> Result<Instruction> {
    decode(slots, Function::Tril { k: node.k() }, &[node.x()], Vec::new(), node.out())
}

pub fn triu(slots: &mut Slots, node: fb::TriuNode) -> Result<Instruction> {
    decode(slots, Function::Triu { k: node.k() }, &[node.x()], Vec::new(), node.out())
}

/// Records, for each strided view, the axes that its only reader reduces.
pub fn note_reduced(chain: &mut Chain) {
    let mut readers: HashMap<Value, Option<Vec<i32>>> = HashMap::new();
    for instruction in &chain.instructions {
        for value in instruction.op.reads() {
            let axes = match &instruction.op {
                Op::Call { function, .. } => reduced_by(function),
                _ => None,
            };
            // A second reader may read any axes.
            readers.entry(value).and_modify(|axes| *axes = None).or_insert(axes);
        }
    }
    chain.tensor_outputs().for_each(|value| drop(readers.insert(value, None)));
    for Instruction { op, out } in &mut chain.instructions {
        if let (
            Op::Call { function: Function::AsStrided { reduced, .. }, .. },
            Out::Tensor(value),
        ) = (op, out)
        {
            *reduced = readers.remove(value).flatten();
        }
    }
}

/// Returns the axes that a function reduces with MLX's reductions.
fn reduced_by(function: &Function) -> Option<Vec<i32>> {
    match function {
        Function::Max(over)
        | Function::Mean(over)
        | Function::Min(over)
        | Function::Prod(over)
        | Function::Sum(over) => Some(over.axes.clone()),
        _ => None,
    }
}

/// Returns whether some elements of a view share their memory.
fn overlaps(shape: &[i32], strides: &[i32]) -> bool {
    let axes = shape.iter().zip(strides).filter(|(&size, &stride)| size > 1 && stride != 0);
    let mut axes: SmallVec<[(i64, i64); 8]> =
        axes.map(|(&size, &stride)| (i64::from(stride), i64::from(size))).collect();
    axes.sort_unstable();
    let mut reach = 0;
    axes.iter().any(|&(stride, size)| {
        let is_inside = stride <= reach;
        reach += stride.saturating_mul(size - 1);
        is_inside
    })
}

/// Returns whether MLX (0.32.2) reduces these axes of an overlapping view correctly. On a CPU, MLX computes
/// several results at once: their number is the smallest stride of a reduced axis. Therefore exactly this
/// number of elements must be contiguous in the last axes, and none of these axes may be reduced.
fn reduces_within(shape: &[i32], strides: &[i32], reduced: &[i32]) -> bool {
    let rank = shape.len() as i32;
    let is_reduced = |axis: i32| {
        reduced.is_empty() || reduced.contains(&axis) || reduced.contains(&(axis - rank))
    };
    let of_axis = |axis: i32| (i64::from(shape[axis as usize]), i64::from(strides[axis as usize]));
    let least = (0..rank).filter(|&axis| is_reduced(axis)).map(of_axis);
    let Some(least) = least.filter(|(size, _)| *size > 1).map(|(_, stride)| stride).min() else {
        return true;
    };
    let mut in_a_row = 1;
    for axis in (0..rank).rev() {
        let (size, stride) = of_axis(axis);
        if in_a_row == least {
            // More contiguous elements than the stride would overlap.
            return size == 1 || stride != in_a_row || is_reduced(axis) && stride == least;
        }
        if is_reduced(axis) || size > 1 && stride != in_a_row {
            return false;
        }
        in_a_row *= size;
    }
    false
}

/// Returns a view with any strides of the elements of `x` in row-major order. Checks the bounds, because MLX does
/// not.
pub fn run_as_strided(
    arguments: &Arguments,
    offset: u64,
    reduced: Option<&[i32]>,
) -> Result<Array> {
    // MLX needs a contiguous array with one axis.
    let x = match arguments.tensor(0)? {
        x if x.ndim() > 1 => x.clone(),
        x => x.contiguous()?,
    };
    let (shape, strides) = arguments.ints.split_at(arguments.ints.len() / 2);
    check_size(shape, x.dtype())?;
    let offset = i64::try_from(offset).unwrap_or(i64::MAX);
    let (mut first, mut last) = (offset, offset);
    for (&size, &stride) in shape.iter().zip(strides) {
        let reach = i64::from(size - 1).saturating_mul(i64::from(stride));
        first = first.saturating_add(reach.min(0));
        last = last.saturating_add(reach.max(0));
    }
    let is_empty = shape.contains(&0);
    if !is_empty && (first < 0 || last >= x.size() as i64) {
        fail!(
            Program,
            "a view of elements {first} to {last} of a tensor of {}: shape {shape:?}, strides \
             {strides:?}, offset {offset}",
            x.size()
        );
    }
    let strides: Vec<i64> = strides.iter().map(|&stride| i64::from(stride)).collect();
    let offset = if is_empty { 0 } else { offset as usize };
    let (sizes, rank) = (shape.as_ptr(), shape.len());
    let is_copied = overlaps(shape, &arguments.ints[rank..])
        && reduced.is_none_or(|axes| !reduces_within(shape, &arguments.ints[rank..], axes));
    // SAFETY: the lists have the given lengths; all elements lie within the array.
    let view = call(|made, stream| unsafe {
        mlx_sys::mlx_as_strided(
            made,
            x.as_ptr(),
            sizes,
            rank,
            strides.as_ptr(),
            rank,
            offset,
            stream,
        )
    })?;
    // Other operations of MLX are wrong for elements that share memory.
    if is_copied {
        return Ok(view.contiguous()?);
    }
    Ok(view)
}

/// Broadcasts. A size of -1 stands for the size of `x`.
pub fn run_broadcast_to(arguments: &Arguments) -> Result<Array> {
    let x = arguments.tensor(0)?;
    let mut shape = arguments.ints.clone();
    let more = shape.len().checked_sub(x.ndim());
    for (index, size) in shape.iter_mut().enumerate() {
        if let (-1, Some(axis)) = (*size, more.and_then(|more| index.checked_sub(more))) {
            *size = x.dim(axis as i32);
        }
    }
    if shape.iter().any(|&size| size < 0) {
        fail!(Program, "cannot broadcast {:?} to {shape:?}", x.shape());
    }
    // SAFETY: the list has the given length.
    call(|made, stream| unsafe {
        mlx_sys::mlx_broadcast_to(made, x.as_ptr(), shape.as_ptr(), shape.len(), stream)
    })
}

pub fn run_flip(arguments: &Arguments, axes: &[i32]) -> Result<Array> {
    let x = arguments.tensor(0)?;
    if axes.is_empty() {
        return Ok(x.clone());
    }
    // SAFETY: the list has the given length.
    call(|made, stream| unsafe {
        mlx_sys::mlx_flip_axes(made, x.as_ptr(), axes.as_ptr(), axes.len(), stream)
    })
}

pub fn run_pad(arguments: &Arguments, mode: PadMode, value: f32) -> Result<Array> {
    let x = arguments.tensor(0)?;
    let width = &arguments.ints;
    if width.len() != 2 * x.ndim() || width.iter().any(|&n| n < 0) {
        fail!(Program, "cannot pad {:?} by {width:?}", x.shape());
    }
    let low: Vec<i32> = width.iter().step_by(2).copied().collect();
    let high: Vec<i32> = width.iter().skip(1).step_by(2).copied().collect();
    let axes: Vec<i32> = (0..x.ndim() as i32).collect();
    let mut sizes = Vec::with_capacity(axes.len());
    for ((&size, &low), &high) in x.shape().iter().zip(&low).zip(&high) {
        sizes.push(size.checked_add(low).and_then(|size| size.checked_add(high)).unwrap_or(-1));
    }
    check_size(&sizes, x.dtype())?;
    let (mode, value) = match mode {
        PadMode::Constant => (c"constant", value),
        PadMode::Edge => (c"edge", 0.0),
    };
    if mode == c"edge" && x.size() == 0 {
        fail!(Program, "cannot pad {:?} with its edges: an axis has no element", x.shape());
    }
    let value = Array::from_f32(value);
    let n = axes.len();
    // SAFETY: the lists have the given lengths.
    call(|made, stream| unsafe {
        mlx_sys::mlx_pad(
            made,
            x.as_ptr(),
            axes.as_ptr(),
            n,
            low.as_ptr(),
            n,
            high.as_ptr(),
            n,
            value.as_ptr(),
            mode.as_ptr(),
            stream,
        )
    })
}

pub fn run_repeat(arguments: &Arguments, axis: i32) -> Result<Array> {
    let (x, repeats) = (arguments.tensor(0)?, arguments.int(0)?);
    let axis = normalize_axis(axis, x.ndim())?;
    let mut shape = x.shape().to_vec();
    shape[axis] = shape[axis].checked_mul(repeats).unwrap_or(-1);
    check_size(&shape, x.dtype())?;
    // SAFETY: the array is live.
    call(|made, stream| unsafe {
        mlx_sys::mlx_repeat_axis(made, x.as_ptr(), repeats, axis as i32, stream)
    })
}

pub fn run_roll(arguments: &Arguments, axes: &[i32]) -> Result<Array> {
    let (x, shifts) = (arguments.tensor(0)?, &arguments.ints);
    if x.size() == 0 {
        return Ok(x.clone());
    }
    let mut places = Vec::with_capacity(axes.len());
    for &axis in axes {
        places.push(normalize_axis(axis, x.ndim())? as i32);
    }
    let (n, by) = (places.len(), shifts.as_ptr());
    // SAFETY: the lists have the given lengths.
    call(|made, stream| unsafe {
        mlx_sys::mlx_roll_axes(made, x.as_ptr(), by, shifts.len(), places.as_ptr(), n, stream)
    })
}

/// Removes axes with one element: those in `dims`, or all. An axis in `dims` with more elements stays.
pub fn run_squeeze(arguments: &Arguments, dims: &[i32]) -> Result<Array> {
    let x = arguments.tensor(0)?;
    let mut axes = Vec::new();
    for axis in 0..x.ndim() as i32 {
        let named =
            dims.is_empty() || dims.contains(&axis) || dims.contains(&(axis - x.ndim() as i32));
        if named && x.dim(axis) == 1 {
            axes.push(axis);
        }
    }
    Ok(x.squeeze_axes(&axes)?)
}

pub fn run_stack(arguments: &Arguments, axis: i32) -> Result<Array> {
    let arrays = Arrays::of(arguments.tensors.iter().copied());
    arrays.stack(axis)
}

pub fn run_tile(arguments: &Arguments) -> Result<Array> {
    let (x, reps) = (arguments.tensor(0)?, &arguments.ints);
    // The shape with fewer axes gets leading axes of one element.
    let rank = x.ndim().max(reps.len());
    let at = |list: &[i32], index: usize| match (index + list.len()).checked_sub(rank) {
        Some(index) => list[index],
        None => 1,
    };
    let sizes: Vec<i32> = (0..rank)
        .map(|index| at(x.shape(), index).checked_mul(at(reps, index)).unwrap_or(-1))
        .collect();
    check_size(&sizes, x.dtype())?;
    // SAFETY: the list has the given length.
    call(|made, stream| unsafe {
        mlx_sys::mlx_tile(made, x.as_ptr(), reps.as_ptr(), reps.len(), stream)
    })
}

pub fn run_triangle(function: &Function, arguments: &Arguments, k: i32) -> Result<Array> {
    let x = arguments.tensor(0)?;
    let work = match function {
        Function::Tril { .. } => mlx_sys::mlx_tril,
        _ => mlx_sys::mlx_triu,
    };
    // SAFETY: the array is live.
    call(|made, stream| unsafe { work(made, x.as_ptr(), k, stream) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_with_shared_places_overlap() {
        assert!(!overlaps(&[2, 3, 4], &[12, 4, 1]));
        assert!(!overlaps(&[2, 3, 4], &[0, 1, 3]));
        assert!(overlaps(&[1, 16, 3, 8], &[272, 16, 8, 1]));
        assert!(overlaps(&[2, 2], &[1, 1]));
        assert!(overlaps(&[3], &[-1]));
    }

    /// Windows of pooling, which MLX reduces without a copy, and other views.
    #[test]
    fn windows_are_reduced_where_they_lie() {
        let (shape, strides) = ([1, 16, 3, 8], [272, 16, 8, 1]);
        assert!(reduces_within(&shape, &strides, &[2]));
        assert!(reduces_within(&shape, &strides, &[-2]));
        assert!(!reduces_within(&shape, &strides, &[1]));
        assert!(!reduces_within(&[1, 16, 3, 8], &[272, 16, 7, 1], &[2]));
        let (shape, strides) = ([1, 16, 8, 3, 2, 16], [4608, 256, 32, 256, 16, 1]);
        assert!(reduces_within(&shape, &strides, &[3, 4]));
        assert!(!reduces_within(&shape, &strides, &[1]));
    }
}
