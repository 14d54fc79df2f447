//! Views and shapes.

use std::ops::RangeInclusive;

use mlx_rs::Array;
use smallvec::SmallVec;

use super::{instruction, ints};
use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Instruction, Int, IntBinary, Op, Out, Value};
use crate::ops::frame::Frame;
use crate::ops::slots::Slots;
use etkv::mlx::{call, slice_axis, Arrays};

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

/// Decodes a split into one piece for each output. A single size applies to all pieces; only the last piece may be
/// smaller. Several sizes are the sizes of the pieces.
pub fn split(slots: &mut Slots, node: fb::SplitNode) -> Result<Vec<Instruction>> {
    let sizes = ints(slots, node.sizes())?;
    let literals: Option<Vec<i64>> = sizes
        .iter()
        .map(|size| match size {
            Int::Literal(size) => Some(*size),
            Int::Value(_) => None,
        })
        .collect();
    let Some(sizes) = literals else {
        return split_at_run(slots, node, &sizes);
    };
    let pieces = pieces(&sizes, node.outs().len())?;
    let x = slots.read(node.x())?;
    let (least, most) = match (&sizes[..], pieces.last()) {
        (_, None) => return Ok(Vec::new()),
        // The last piece has at least one element.
        ([_], Some(&(start, stop))) => (start + 1, stop),
        (_, Some(&(_, stop))) => (stop, stop),
    };
    node.outs()
        .iter()
        .zip(pieces)
        .map(|(out, (start, stop))| {
            let op = Op::Piece { x, axis: node.axis(), start, stop, sizes: least..=most };
            Ok(instruction(op, slots.write(out)?))
        })
        .collect()
}

/// Decodes a split whose sizes are known only at run time, as slices with computed bounds.
fn split_at_run(slots: &mut Slots, node: fb::SplitNode, sizes: &[Int]) -> Result<Vec<Instruction>> {
    let n = node.outs().len();
    let each = size_of_each(sizes, n)?;
    let (x, axis) = (slots.read(node.x())?, Int::Literal(i64::from(node.axis())));
    let (mut made, mut start) = (Vec::with_capacity(2 * n), Int::Literal(0));
    for (out, size) in node.outs().iter().zip(each) {
        let sum = slots.new_int();
        let op = Op::IntBinary { function: IntBinary::Add, a: start, b: size };
        made.push(instruction(op, Out::Int(sum)));
        let stop = Int::Value(sum);
        made.push(instruction(Op::Slice { x, axis, start, stop, step: 1 }, slots.write(out)?));
        start = stop;
    }
    Ok(made)
}

/// Returns the size of each of `n` pieces.
fn size_of_each<T: Copy>(sizes: &[T], n: usize) -> Result<Vec<T>> {
    match sizes {
        [size] => Ok(vec![*size; n]),
        sizes if sizes.len() == n => Ok(sizes.to_vec()),
        sizes => fail!(Program, "expected {} outputs of a split, got {n}", sizes.len()),
    }
}

/// Returns the start and end of each of `n` pieces.
fn pieces(sizes: &[i64], n: usize) -> Result<Vec<(i32, i32)>> {
    let mut start = 0i32;
    size_of_each(sizes, n)?
        .into_iter()
        .map(|size| {
            let stop = i32::try_from(size)
                .ok()
                .filter(|&size| size > 0)
                .and_then(|size| start.checked_add(size));
            match stop {
                Some(stop) => Ok((std::mem::replace(&mut start, stop), stop)),
                None => {
                    fail!(
                        Program,
                        "expected pieces of 1 to 2^31 - 1 elements in a split, got {sizes:?}"
                    )
                }
            }
        })
        .collect()
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
    let x = frame.tensor(x)?;
    Ok(x.reshape(&resolved(frame, x, shape)?)?)
}

/// A shape. With at most eight axes it needs no allocation.
pub type Sizes = SmallVec<[i32; 8]>;

/// Returns the numbers of a shape.
pub fn sizes(frame: &Frame, shape: &[Int]) -> Result<Sizes> {
    shape.iter().map(|&dim| frame.int(dim)).collect()
}

/// Returns the shape to which two shapes broadcast.
pub fn broadcast(a: &[i32], b: &[i32]) -> Option<Sizes> {
    let rank = a.len().max(b.len());
    let size = |shape: &[i32], axis: usize| match (axis + shape.len()).checked_sub(rank) {
        Some(own) => shape[own],
        None => 1,
    };
    (0..rank)
        .map(|axis| match (size(a, axis), size(b, axis)) {
            (a, b) if a == b || b == 1 => Some(a),
            (1, b) => Some(b),
            _ => None,
        })
        .collect()
}

/// Returns `shape` for the elements of `x`, with the open dimension, -1, replaced by its size.
pub fn resolved(frame: &Frame, x: &Array, shape: &[Int]) -> Result<Sizes> {
    let mut shape = sizes(frame, shape)?;
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
        fail!(Program, "cannot reshape {:?} to {shape:?}: they differ in elements", x.shape());
    }
    if let (Some(product), Some(open)) = (product, shape.iter_mut().find(|dim| **dim == -1)) {
        *open = (x.size() / product) as i32;
    }
    Ok(shape)
}

/// Slices along one axis as Python does: negative bounds count from the end, and all bounds are clamped to
/// the axis. A negative step goes backwards.
pub fn run_slice(
    frame: &Frame,
    x: Value,
    axis: Int,
    [start, stop]: [Int; 2],
    step: i32,
) -> Result<Array> {
    let x = frame.tensor(x)?;
    let axis = normalize_axis(frame.int(axis)?, x.ndim())?;
    if step == 0 {
        fail!(Program, "expected a slice with a step other than 0");
    }
    let size = x.dim(axis as i32);
    let bound = |bound: i32| if bound < 0 { bound.saturating_add(size) } else { bound };
    let (start, stop) = (bound(frame.int(start)?), bound(frame.int(stop)?));
    if step > 0 {
        let start = start.clamp(0, size);
        return slice_axis(x, axis, start, stop.clamp(start, size), step);
    }
    // A slice that goes backwards may end at the index before element 0. MLX counts negative indices from the end.
    let start = start.clamp(-1, size - 1);
    let stop = stop.clamp(-1, start);
    match stop == start {
        true => slice_axis(x, axis, 0, 0, 1),
        false => slice_axis(x, axis, start, if stop < 0 { -size - 1 } else { stop }, step),
    }
}

pub fn run_piece(
    x: &Array,
    axis: i32,
    [start, stop]: [i32; 2],
    sizes: &RangeInclusive<i32>,
) -> Result<Array> {
    let (axis, size) = axis_to_split(x, axis, sizes)?;
    slice_axis(x, axis, start, stop.min(size), 1)
}

/// Returns a normalized axis and its size. Refuses a size that is not in `sizes`.
pub fn axis_to_split(x: &Array, axis: i32, sizes: &RangeInclusive<i32>) -> Result<(usize, i32)> {
    let axis = normalize_axis(axis, x.ndim())?;
    let size = x.dim(axis as i32);
    if !sizes.contains(&size) {
        fail!(
            Program,
            "expected an axis of {} to {} elements to split, got {size}",
            sizes.start(),
            sizes.end()
        );
    }
    Ok((axis, size))
}

pub fn run_concatenate(frame: &Frame, tensors: &[Value], axis: i32) -> Result<Array> {
    let tensors = Arrays::of(frame.tensors(tensors)?);
    // SAFETY: the list outlives the call.
    call(|made, stream| unsafe {
        mlx_sys::mlx_concatenate_axis(made, tensors.as_raw(), axis, stream)
    })
}

pub fn run_sym_size(x: &Array, dim: i32) -> Result<i32> {
    let axis = normalize_axis(dim, x.ndim())?;
    Ok(x.dim(axis as i32))
}

pub fn run_last_token(x: &Array) -> Result<Array> {
    if x.ndim() <= TOKENS {
        fail!(Program, "expected a tensor [1, T, ...], got shape {:?}", x.shape());
    }
    let n = x.dim(TOKENS as i32);
    slice_axis(x, TOKENS, (n - 1).max(0), n, 1)
}

/// Returns an axis counted from the front; a negative one counts from the end.
pub fn normalize_axis(axis: i32, ndim: usize) -> Result<usize> {
    let n = ndim as i32;
    if axis < -n || axis >= n {
        fail!(Program, "expected an axis from {} to {}, got {axis}", -n, n - 1);
    }
    Ok(if axis < 0 { axis + n } else { axis } as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_lie_side_by_side() {
        assert_eq!(pieces(&[2, 3, 4], 3).unwrap(), [(0, 2), (2, 5), (5, 9)]);
        assert_eq!(pieces(&[4], 3).unwrap(), [(0, 4), (4, 8), (8, 12)]);
        assert_eq!(pieces(&[4], 0).unwrap(), []);
    }

    #[test]
    fn splits_that_do_not_fit_are_refused() {
        for (sizes, n) in [
            (&[2, 3][..], 3),
            (&[], 1),
            (&[0], 2),
            (&[-1, 2], 2),
            (&[1 << 40], 1),
            (&[i64::from(i32::MAX), 1], 2),
        ] {
            assert!(pieces(sizes, n).is_err(), "{sizes:?} for {n} outputs");
        }
    }

    #[test]
    fn a_piece_is_of_an_axis_of_the_right_size() {
        etkv::mlx::run(|| {
            let x = Array::from_slice(&[0, 1, 2, 3, 4, 5, 6], &[1, 7]);
            let piece = |start, stop, sizes| run_piece(&x, -1, [start, stop], &sizes);
            assert_eq!(piece(2, 5, 7..=7)?.shape(), [1, 3]);
            assert_eq!(piece(6, 9, 7..=9)?.contiguous()?.as_slice::<i32>(), [6]);
            assert!(piece(0, 3, 6..=6).is_err());
            assert!(piece(0, 3, 8..=9).is_err());
            assert!(run_piece(&x, 2, [0, 1], &(1..=7)).is_err());
            Ok(())
        })
        .unwrap();
    }
}
