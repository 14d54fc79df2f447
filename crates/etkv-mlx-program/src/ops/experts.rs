//! Products with weights selected by an index, for a mixture of experts.

use mlx_rs::{Array, Dtype};

use super::calls::{decode, Arguments};
use super::indexing::{check_range, read_range};
use super::packed::packing;
use super::weights::{as_rows, handle, Weights};
use super::{by_expert, linear, many_rows, quantized};
use crate::dtype::is_float;
use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Function, Instruction, Int, Packing, PackingMode};
use crate::ops::slots::Slots;
use etkv::kernels::Product;
use etkv::mlx::{call, cast, slice_axis};

/// Returns the integer argument for sorted indices, if it is known only at run time.
fn sorted_flag(slots: &Slots, flag: Option<fb::IntOrVid>) -> Result<Vec<Int>> {
    flag.into_iter().map(|flag| slots.int(flag)).collect()
}

pub fn gather_mm(slots: &mut Slots, node: fb::GatherMmNode) -> Result<Instruction> {
    let (lhs, rhs) = (node.lhs_indices(), node.rhs_indices());
    let function = Function::GatherMm {
        lhs: lhs.is_some(),
        rhs: rhs.is_some(),
        sorted: node.sorted_indices(),
    };
    let ints = sorted_flag(slots, node.sorted_indices_flag())?;
    let tensors: Vec<_> =
        [Some(node.a()), Some(node.b()), lhs, rhs].into_iter().flatten().collect();
    decode(slots, function, &tensors, ints, node.out())
}

pub fn gather_qmm(slots: &mut Slots, node: fb::GatherQmmNode) -> Result<Instruction> {
    let (biases, lhs, rhs) = (node.biases(), node.lhs_indices(), node.rhs_indices());
    let function = Function::GatherQmm {
        packing: packing(node.mode(), node.group_size(), node.bits(), biases.is_some())?,
        transpose: node.transpose(),
        biases: biases.is_some(),
        lhs: lhs.is_some(),
        rhs: rhs.is_some(),
        sorted: node.sorted_indices(),
    };
    let ints = sorted_flag(slots, node.sorted_indices_flag())?;
    let required = [node.x(), node.w(), node.scales()].map(Some);
    let tensors: Vec<_> = required.into_iter().chain([biases, lhs, rhs]).flatten().collect();
    decode(slots, function, &tensors, ints, node.out())
}

/// Returns whether the indices are sorted.
fn is_sorted(arguments: &Arguments, sorted: bool) -> bool {
    arguments.ints.first().map_or(sorted, |&flag| flag != 0)
}

/// Checks the indices of matrices. MLX itself does not check an index past the end, and treats a negative one as
/// unsigned.
fn check(arguments: &Arguments, index: usize, given: bool, matrices: &Array) -> Result<()> {
    if !given {
        return Ok(());
    }
    if matrices.ndim() < 2 {
        fail!(Program, "expected matrices, got shape {:?}", matrices.shape());
    }
    let leading = &matrices.shape()[..matrices.ndim() - 2];
    let n: i64 = leading.iter().map(|&size| i64::from(size)).product();
    let n = i32::try_from(n).unwrap_or(i32::MAX);
    check_range(arguments.frame, arguments.values[index], n)
}

/// Returns the indices of weights and the shape of the indices, if each selected weight is multiplied separately: on
/// a CPU, for weights along one axis.
fn chosen<'a>(
    arguments: &Arguments<'a, '_>,
    index: usize,
    weights: &Array,
    [lhs, rhs]: [bool; 2],
) -> Result<Option<(Vec<i32>, &'a [i32])>> {
    let x = arguments.tensor(0)?;
    if arguments.frame.on_gpu() || lhs || !rhs || weights.ndim() != 3 || x.ndim() < 2 {
        return Ok(None);
    }
    let indices = arguments.tensor(index)?;
    if indices.size() == 0 || x.size() == 0 {
        return Ok(None);
    }
    let read = read_range(arguments.frame, arguments.values[index], weights.dim(0))?;
    Ok(Some((read, indices.shape())))
}

/// Returns one matrix of a stack.
fn matrix(matrices: &Array, index: i32) -> Result<Array> {
    Ok(slice_axis(matrices, 0, index, index + 1, 1)?.squeeze_axes(&[0])?)
}

/// Returns indices, if there are any, in the dtype that MLX's products require. MLX itself would convert indices on
/// its default stream. On an NVIDIA GPU it would then wait forever, because nothing starts the work of that stream.
fn indices(arguments: &Arguments, index: usize, given: bool) -> Result<Option<Array>> {
    given.then(|| cast(arguments.tensor(index)?, Dtype::Uint32)).transpose()
}

pub fn run_gather_mm(arguments: &Arguments, [lhs, rhs]: [bool; 2], sorted: bool) -> Result<Array> {
    let (a, b) = (arguments.tensor(0)?, arguments.tensor(1)?);
    if a.dtype() == b.dtype() && is_float(a.dtype()) {
        if let Some((indices, leading)) = chosen(arguments, 2, b, [lhs, rhs])? {
            return by_expert::multiply(a, &indices, leading, |rows, index| {
                linear::linear(&Product::plain(rows, &matrix(b, index)?, true))
            });
        }
    }
    check(arguments, 2, lhs, a)?;
    check(arguments, 2 + usize::from(lhs), rhs, b)?;
    if !is_float(a.dtype()) || !is_float(b.dtype()) {
        fail!(Program, "expected products of floats, got {:?} and {:?}", a.dtype(), b.dtype());
    }
    // On a CPU, MLX multiplies only float32 in this way. Each call would convert both operands completely.
    let dtype = if a.dtype() == b.dtype() { a.dtype() } else { Dtype::Float32 };
    let wide = if arguments.frame.on_gpu() { dtype } else { Dtype::Float32 };
    let (a, b) = (as_rows(cast(a, wide)?)?, cast(b, wide)?);
    let (left, right) =
        (indices(arguments, 2, lhs)?, indices(arguments, 2 + usize::from(lhs), rhs)?);
    let (left, right) = (handle(left.as_ref()), handle(right.as_ref()));
    // On CUDA, MLX's products for sorted indices are wrong if a weight is transposed.
    let sorted = is_sorted(arguments, sorted) && cfg!(target_os = "macos");
    // SAFETY: the arrays are live, or empty handles; each index is in range.
    let made = call(|made, stream| unsafe {
        mlx_sys::mlx_gather_mm(made, a.as_ptr(), b.as_ptr(), left, right, sorted, stream)
    })?;
    cast(&made, dtype)
}

pub fn run_gather_qmm(
    arguments: &Arguments,
    packing: Packing,
    transpose: bool,
    [biases, lhs, rhs]: [bool; 3],
    sorted: bool,
) -> Result<Array> {
    let (x, w) = (arguments.tensor(0)?, arguments.tensor(1)?);
    let first = 3 + usize::from(biases);
    let biases = if biases { Some(arguments.tensor(3)?) } else { None };
    let weights = Weights::new([w, arguments.tensor(2)?], biases, packing);
    if packing.mode == PackingMode::Affine && transpose {
        if let Some((indices, leading)) = chosen(arguments, first, w, [lhs, rhs])? {
            return by_expert::multiply(x, &indices, leading, |rows, index| {
                quantized::linear_on_cpu(rows, &weights.matrix(index)?)
            });
        }
    }
    check(arguments, first, lhs, x)?;
    check(arguments, first + usize::from(lhs), rhs, w)?;
    let left = indices(arguments, first, lhs)?;
    let right = indices(arguments, first + usize::from(lhs), rhs)?;
    let indices = [left.as_ref(), right.as_ref()];
    if transpose {
        if let Some(made) = many_rows::gathered(x, &weights, indices)? {
            return Ok(made);
        }
    }
    weights.gathered(x, indices, transpose, is_sorted(arguments, sorted))
}
