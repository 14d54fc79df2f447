//! The dtypes of values, if they are certain.

use std::collections::HashMap;

use mlx_rs::{Array, Dtype};

use crate::dtype::{dtype_of, is_float};
use crate::ir::{Graph, InputSpec, Op, Unary, Value};

/// Returns the dtypes of constants and inputs, and of the results of the main chain whose dtypes follow from these.
pub fn known(graph: &Graph) -> HashMap<Value, Dtype> {
    with_constants(graph, &[])
}

/// [`known`], with the dtypes of the loaded constants, including constants that are computed at load.
pub fn with_constants(graph: &Graph, loaded: &[Option<Array>]) -> HashMap<Value, Dtype> {
    let constants = (0..).map(Value).zip(&graph.constants);
    let mut dtypes: HashMap<Value, Dtype> = constants
        .filter(|(value, _)| !graph.init_targets.contains(value))
        .map(|(value, constant)| (value, constant.dtype))
        .collect();
    let loaded = (0..).map(Value).zip(loaded);
    dtypes.extend(loaded.filter_map(|(value, array)| Some((value, array.as_ref()?.dtype()))));
    for input in &graph.inputs {
        if let InputSpec::Tensor { value, scalar_type, .. } = input {
            dtypes.extend(dtype_of(*scalar_type).ok().map(|dtype| (*value, dtype)));
        }
    }
    for instruction in &graph.main.instructions {
        if let Some(dtype) = of(&instruction.op, &dtypes) {
            dtypes.extend(instruction.out.tensors().map(|value| (value, dtype)));
        }
    }
    dtypes
}

fn of(op: &Op, dtypes: &HashMap<Value, Dtype>) -> Option<Dtype> {
    let of = |value: &Value| dtypes.get(value).copied();
    match op {
        Op::AsType { dtype, .. } | Op::Rotary { dtype, .. } | Op::NormInFloat32 { dtype, .. } => {
            Some(*dtype)
        }
        Op::UpdateAndAttend { out_dtype, .. } => *out_dtype,
        Op::UpdateRecurrent(call) => call.out_dtype,
        Op::Dequantize { dtype, .. } => *dtype,
        Op::MetalKernel { kernel, .. } => Some(kernel.dtype()),
        Op::ExpandDims { x, .. }
        | Op::Reshape { x, .. }
        | Op::Transpose { x, .. }
        | Op::ReshapeTranspose { x, .. }
        | Op::TransposeReshape { x, .. }
        | Op::Slice { x, .. }
        | Op::Piece { x, .. }
        | Op::Split { x, .. }
        | Op::Take { x, .. }
        | Op::TakeTransposed { x, .. }
        | Op::LastToken { x }
        | Op::WantedRows { x }
        | Op::RotaryPeriods { inverse: x }
        | Op::Unary { function: Unary::Neg, x } => of(x),
        // Functions of integers return floats.
        Op::Unary { x, .. } => of(x).filter(|&dtype| is_float(dtype)),
        Op::Concatenate { .. }
        | Op::Activation { .. }
        | Op::Binary { .. }
        | Op::RmsNorm { .. }
        | Op::LayerNorm { .. }
        | Op::Linear { .. }
        | Op::LinearBlock { .. }
        | Op::Addmm { .. } => shared(op.reads().iter().map(of)),
        Op::LinearHeads { x, weight, bias, heads, .. } => {
            let product = [of(x), of(weight)].into_iter().chain(bias.as_ref().map(of));
            shared(product.chain([Some(heads.dtype)]))
        }
        Op::QuantizedMatmul { x, scales, .. } => shared([of(x), of(scales)].into_iter()),
        Op::Call { .. }
        | Op::Elementwise { .. }
        | Op::If { .. }
        | Op::Scan(_)
        | Op::SymSize { .. }
        | Op::ItemInt { .. }
        | Op::IntBinary { .. } => None,
    }
}

/// Returns the common dtype of all operands, if it is a float. Operations on other dtypes may return another dtype.
fn shared(mut dtypes: impl Iterator<Item = Option<Dtype>>) -> Option<Dtype> {
    let first = dtypes.next().flatten().filter(|&dtype| is_float(dtype))?;
    dtypes.all(|dtype| dtype == Some(first)).then_some(first)
}
