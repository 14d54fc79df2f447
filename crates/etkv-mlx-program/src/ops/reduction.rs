//! Functions over axes.

use mlx_rs::ops::zeros_dtype;
use mlx_rs::{Array, Dtype};

use super::calls::{self, normalize_axis, Arguments};
use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Function, Instruction, OneAxis, Reduction};
use crate::ops::slots::Slots;
use etkv::mlx::{call, cast, cumulative};

pub fn decode(
    slots: &mut Slots,
    function: Function,
    x: &fb::Tid,
    out: &fb::Tid,
) -> Result<Instruction> {
    calls::decode(slots, function, &[x], Vec::new(), out)
}

/// Returns the axes that a node reduces.
pub fn over(axes: Option<flatbuffers::Vector<'_, i32>>, keep_dims: bool) -> Reduction {
    Reduction { axes: axes.into_iter().flatten().collect(), keep_dims }
}

pub fn cumsum(slots: &mut Slots, node: fb::CumsumNode) -> Result<Instruction> {
    let function = Function::Cumsum {
        axis: node.axis(),
        reverse: node.reverse(),
        inclusive: node.inclusive(),
    };
    decode(slots, function, node.x(), node.out())
}

pub fn softmax(slots: &mut Slots, node: fb::SoftmaxNode) -> Result<Instruction> {
    let function = Function::Softmax { axis: node.axis(), precise: node.precise() };
    decode(slots, function, node.x(), node.out())
}

/// Returns the axes of `x` that are reduced.
fn axes_of(x: &Array, over: &Reduction) -> Result<Vec<i32>> {
    if over.axes.is_empty() {
        return Ok((0..x.ndim() as i32).collect());
    }
    let mut axes = Vec::with_capacity(over.axes.len());
    for &axis in &over.axes {
        let axis = normalize_axis(axis, x.ndim())? as i32;
        if axes.contains(&axis) {
            fail!(
                Program,
                "expected each axis to be reduced once, got axis {axis} twice: {:?}",
                over.axes
            );
        }
        axes.push(axis);
    }
    Ok(axes)
}

/// Returns the tensor to reduce. Replaces an empty tensor by a contiguous one: on a CPU, MLX (0.32.2) reads the
/// strides of an empty view, and these may not exist.
fn reduced(arguments: &Arguments) -> Result<Array> {
    let x = arguments.tensor(0)?;
    Ok(if x.size() == 0 { zeros_dtype(x.shape(), x.dtype())? } else { x.clone() })
}

pub fn run(function: &Function, over: &Reduction, arguments: &Arguments) -> Result<Array> {
    let x = &reduced(arguments)?;
    let axes = axes_of(x, over)?;
    let work = match function {
        Function::All(_) => mlx_sys::mlx_all_axes,
        Function::Any(_) => mlx_sys::mlx_any_axes,
        Function::LogSumExp(_) => mlx_sys::mlx_logsumexp_axes,
        Function::Max(_) => mlx_sys::mlx_max_axes,
        Function::Mean(_) => mlx_sys::mlx_mean_axes,
        Function::Median(_) => mlx_sys::mlx_median_axes,
        Function::Min(_) => mlx_sys::mlx_min_axes,
        Function::Prod(_) => mlx_sys::mlx_prod_axes,
        _ => mlx_sys::mlx_sum_axes,
    };
    // The reduction of a tensor without axes is the tensor itself.
    if axes.is_empty()
        && matches!(function, Function::Max(_) | Function::Min(_) | Function::Median(_))
    {
        return Ok(x.clone());
    }
    // SAFETY: the array is live, and the list has the given length.
    call(|made, stream| unsafe {
        work(made, x.as_ptr(), axes.as_ptr(), axes.len(), over.keep_dims, stream)
    })
}

pub fn run_spread(
    function: &Function,
    over: &Reduction,
    ddof: i32,
    arguments: &Arguments,
) -> Result<Array> {
    let x = &reduced(arguments)?;
    let axes = axes_of(x, over)?;
    let work = match function {
        Function::Std { .. } => mlx_sys::mlx_std_axes,
        _ => mlx_sys::mlx_var_axes,
    };
    // SAFETY: as above.
    call(|made, stream| unsafe {
        work(made, x.as_ptr(), axes.as_ptr(), axes.len(), over.keep_dims, ddof, stream)
    })
}

pub fn run_place(function: &Function, over: OneAxis, arguments: &Arguments) -> Result<Array> {
    let x = arguments.tensor(0)?;
    let axis = normalize_axis(over.axis, x.ndim())? as i32;
    if x.dim(axis) == 0 {
        fail!(Program, "expected at least one element in axis {axis} of {:?}, got none", x.shape());
    }
    let work = match function {
        Function::Argmax(_) => mlx_sys::mlx_argmax_axis,
        _ => mlx_sys::mlx_argmin_axis,
    };
    // SAFETY: the array is live.
    call(|made, stream| unsafe { work(made, x.as_ptr(), axis, over.keep_dims, stream) })
}

pub fn run_cumsum(
    arguments: &Arguments,
    axis: i32,
    reverse: bool,
    inclusive: bool,
) -> Result<Array> {
    let x = arguments.tensor(0)?;
    let axis = normalize_axis(axis, x.ndim())? as i32;
    // MLX would divide by the number of elements of the axis, 0.
    if x.size() == 0 {
        return match x.dtype() {
            Dtype::Bool => cast(x, Dtype::Int32),
            _ => Ok(x.clone()),
        };
    }
    // MLX chooses the dtype.
    let dtype = mlx_sys::mlx_optional_dtype { value: x.dtype().into(), has_value: false };
    cumulative(x, axis, |x, axis| {
        // SAFETY: the array is live.
        call(|made, stream| unsafe {
            mlx_sys::mlx_cumsum_axis(made, x.as_ptr(), axis, reverse, inclusive, dtype, stream)
        })
    })
}

pub fn run_softmax(arguments: &Arguments, axis: i32, precise: bool) -> Result<Array> {
    let x = arguments.tensor(0)?;
    let axis = normalize_axis(axis, x.ndim())? as i32;
    // SAFETY: the array is live.
    call(|made, stream| unsafe {
        mlx_sys::mlx_softmax_axis(made, x.as_ptr(), axis, precise, stream)
    })
}
