//! The operations.

mod reads;

use std::ops::RangeInclusive;
use std::sync::Arc;

use mlx_rs::Dtype;

use smallvec::SmallVec;

use super::{Chain, Expression, Function, Int, MetalKernel, RecurrentCall, Value};

/// Element-wise functions of one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Unary {
    Abs,
    Arccos,
    Arccosh,
    Arcsin,
    Arcsinh,
    Arctan,
    Arctanh,
    BitwiseInvert,
    Ceil,
    Cos,
    Cosh,
    Erf,
    Exp,
    Expm1,
    Floor,
    Gelu,
    /// With tanh instead of the error function.
    GeluTanh,
    Log,
    Log10,
    Log1p,
    Log2,
    Neg,
    Reciprocal,
    Rsqrt,
    Sigmoid,
    Sign,
    Silu,
    Sin,
    Sinh,
    Sqrt,
    Square,
    Tan,
    Tanh,
    Trunc,
}

/// Element-wise functions of two tensors, which broadcast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    Atan2,
    Divide,
    FloorDivide,
    LogAddExp,
    Maximum,
    Minimum,
    Multiply,
    Power,
    Remainder,
    Subtract,
}

/// Functions of two integers. Division and remainder round towards minus
/// infinity, as Python's do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum IntBinary {
    Add,
    FloorDivide,
    Modulo,
    Multiply,
    Subtract,
}

/// The elements that `Take` selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Index {
    /// One element; the axis is removed.
    One(Int),
    /// The elements at the indices of a tensor.
    Many(Value),
}

/// The packing of affine-quantized rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Affine {
    /// The number of elements that share a scale and a bias.
    pub group_size: i32,
    /// The number of bits of an element.
    pub bits: i32,
}

/// The arguments of an RMS norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// The weight of each normalized feature.
    pub weight: Option<Value>,
    /// The number to add to the mean square.
    pub eps: f32,
    /// Whether the norm is computed in float32 and rounded once. It is rounded to the dtype of its input,
    /// unless another dtype is stated. If this field is false, the norm is computed as an `RmsNorm`, in the
    /// common dtype of its input and its weight.
    pub in_float32: bool,
}

/// The layout of a product's features as heads. The first heads rotate by rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Heads {
    /// The number of tokens of the product.
    pub tokens: Int,
    /// The number of features of a head.
    pub head_dim: i32,
    /// The number of heads.
    pub n: i32,
    /// The boundaries between pieces: the number of heads before each boundary.
    pub at: Vec<i32>,
    /// The number of heads that rotate: those of all pieces except the last.
    pub rotated: i32,
    /// The position of each token.
    pub offsets: Value,
    /// As in [`Op::Rotary`].
    pub periods: Value,
    /// The dtype of the rotated heads.
    pub dtype: Dtype,
}

/// A chain that runs for each element of an axis.
#[derive(Debug, Clone, PartialEq)]
pub struct Scan {
    /// The axis of the tensors in `originals`.
    pub axis: i32,
    /// The tensors that are split along the axis.
    pub originals: Vec<Value>,
    /// The body's value for each tensor in `originals`: its element in this run.
    pub sliced: Vec<Value>,
    /// The initial value of each value in `inside`.
    pub carried: Vec<Value>,
    /// The body's values that the previous run computes.
    pub inside: Vec<Value>,
    /// The number of outputs that are stacked. The body's other outputs are the values for the next run.
    pub n_stacked: usize,
    /// The instructions.
    pub body: Chain,
}

/// The operation of an instruction. Fields have the names of ExecuTorch's schema, which documents
/// them.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Op {
    Unary {
        function: Unary,
        x: Value,
    },
    Binary {
        function: Binary,
        a: Value,
        b: Value,
    },
    AsType {
        x: Value,
        dtype: Dtype,
    },
    ExpandDims {
        x: Value,
        axis: i32,
    },
    Reshape {
        x: Value,
        shape: Vec<Int>,
    },
    Transpose {
        x: Value,
        perm: Vec<i32>,
    },
    Slice {
        x: Value,
        axis: Int,
        start: Int,
        stop: Int,
        step: i32,
    },
    /// One of the pieces of a Split: `start..stop` of an axis. The size of the axis must be in `sizes`; otherwise the
    /// program is inconsistent.
    Piece {
        x: Value,
        axis: i32,
        start: i32,
        stop: i32,
        sizes: RangeInclusive<i32>,
    },
    /// Created by a pass: the pieces of an axis that is split at these indices, in order. The result is several
    /// tensors. The size of the axis is in `sizes`, as for `Piece`.
    Split {
        x: Value,
        axis: i32,
        at: Vec<i32>,
        sizes: RangeInclusive<i32>,
    },
    /// Created by a pass: a reshape, then a transposition. One reshape is enough if the axes of more than one element
    /// stay in order, as for a single token.
    ReshapeTranspose {
        x: Value,
        shape: Vec<Int>,
        perm: Vec<i32>,
    },
    /// Created by a pass: a transposition, then a reshape. As for the previous operation, one reshape may be enough.
    TransposeReshape {
        x: Value,
        perm: Vec<i32>,
        shape: Vec<Int>,
    },
    /// Created by a pass: a function of `x`, times another tensor if there is one. One kernel launch on a GPU.
    Activation {
        function: Unary,
        x: Value,
        by: Option<Value>,
    },
    /// Created by a pass: several element-wise operations. One kernel launch on a GPU.
    Elementwise {
        expression: Arc<Expression>,
        // With a `SmallVec` here, clones of `Split` that rustc 1.95 compiles at opt-level 1 have a wrong `x`.
        inputs: Box<[Value]>,
    },
    /// Created by a pass: the RMS norm of `x`, computed in float32, times the weight of each feature, times the
    /// single element of `scale`, and then rounded to `dtype`. One kernel launch on a GPU.
    NormInFloat32 {
        x: Value,
        norm: Norm,
        scale: Option<Value>,
        dtype: Dtype,
    },
    Concatenate {
        tensors: Vec<Value>,
        axis: i32,
    },
    Take {
        x: Value,
        index: Index,
        axis: i32,
    },
    RmsNorm {
        x: Value,
        weight: Option<Value>,
        eps: f32,
    },
    LayerNorm {
        x: Value,
        weight: Option<Value>,
        bias: Option<Value>,
        eps: f32,
    },
    Addmm {
        mat1: Value,
        mat2: Value,
        bias: Option<Value>,
        alpha: f32,
        beta: f32,
    },
    QuantizedMatmul {
        x: Value,
        w: Value,
        scales: Value,
        biases: Option<Value>,
        packing: Affine,
        transpose: bool,
    },
    Dequantize {
        w: Value,
        scales: Value,
        biases: Option<Value>,
        packing: Affine,
        dtype: Option<Dtype>,
    },
    UpdateAndAttend {
        q: Value,
        k: Value,
        v: Value,
        position: Value,
        layer: usize,
        scale: f32,
        softcap: Option<f32>,
        /// A logit for each head of `q`.
        sinks: Option<Value>,
        out_dtype: Option<Dtype>,
        /// Set by a pass: only the last query's row is computed.
        last_query: bool,
    },
    /// A recurrent layer of the cache.
    UpdateRecurrent(Box<RecurrentCall>),
    /// Created by a pass: `x` times the transpose of a weight `[out, in]`, or times a weight that is stored
    /// transposed, `[in, out]`.
    Linear {
        x: Value,
        weight: Value,
        bias: Option<Value>,
        transposed: bool,
    },
    /// Created by a pass: a `Linear` with the operations around it in a layer. `x` is normalized first if there is a
    /// norm. If there is a gate, its function is applied to the first half of the features. The result is multiplied
    /// by the second half. Then the `residual` is added. One kernel launch on a GPU for a few rows.
    LinearBlock {
        x: Value,
        weight: Value,
        bias: Option<Value>,
        transposed: bool,
        norm: Option<Norm>,
        gate: Option<Unary>,
        residual: Option<Value>,
    },
    /// Created by a pass: a `Linear` whose features are heads. Its input rows are normalized first if there is a
    /// norm. The results are the pieces, `[1, heads, T, head_dim]`. One kernel launch on a GPU for a few rows.
    LinearHeads {
        x: Value,
        weight: Value,
        bias: Option<Value>,
        transposed: bool,
        norm: Option<Norm>,
        heads: Heads,
    },
    /// Created by a pass: rows of a weight that is stored transposed.
    TakeTransposed {
        x: Value,
        index: Value,
    },
    /// Created by a pass: the rotary embedding of `x`, `[1, heads, T, head_dim]`, in `dtype`. Token `i` is at
    /// position `offsets[i]`. Element `j` rotates together with `head_dim / 2 + j`, by `1 / periods[j]` per position.
    Rotary {
        x: Value,
        offsets: Value,
        periods: Value,
        dtype: Dtype,
    },
    /// Created by a pass: the reciprocal of each element of a constant, as a tensor of one axis.
    RotaryPeriods {
        inverse: Value,
    },
    /// Created by a pass: the last row of `x` along the axis of tokens, its second axis.
    LastToken {
        x: Value,
    },
    /// Created by a pass: the last row of `x` in a run that needs only the last logits; all of `x` in other runs.
    WantedRows {
        x: Value,
    },
    /// A function that no pass transforms, with tensors and integers in the order that [`Function`] documents.
    Call {
        function: Function,
        tensors: SmallVec<[Value; 4]>,
        ints: Vec<Int>,
    },
    /// Runs one of two chains. Both have the same number of outputs, and all outputs are tensors. The results
    /// are those of the chain that runs.
    If {
        cond: Int,
        then: Box<Chain>,
        otherwise: Box<Chain>,
    },
    /// A chain that runs for each element of an axis. The results are the outputs of the chain, each stacked along
    /// that axis, followed by the carried values after the last element.
    Scan(Box<Scan>),
    /// A Metal kernel, identified by what it computes. It has one result for each of `shapes`.
    MetalKernel {
        kernel: MetalKernel,
        inputs: Vec<Value>,
        shapes: Vec<Vec<Int>>,
    },
    SymSize {
        x: Value,
        dim: i32,
    },
    /// The element of a tensor with one element.
    ItemInt {
        x: Value,
    },
    IntBinary {
        function: IntBinary,
        a: Int,
        b: Int,
    },
}

impl Op {
    /// Returns whether instructions with the same arguments have the same results and no side effects.
    pub fn is_repeatable(&self) -> bool {
        match self {
            op if op.writes_cache() => false,
            Op::If { .. } | Op::Scan(_) => false,
            Op::Call { function, .. } => function.is_repeatable(),
            _ => true,
        }
    }

    /// Returns whether the instruction writes a layer of the cache.
    pub fn writes_cache(&self) -> bool {
        matches!(self, Op::UpdateAndAttend { .. } | Op::UpdateRecurrent(_))
    }

    /// Returns the positions of an instruction that writes a layer of the cache.
    pub fn position_mut(&mut self) -> Option<&mut Value> {
        match self {
            Op::UpdateAndAttend { position, .. } => Some(position),
            Op::UpdateRecurrent(call) => Some(&mut call.position),
            _ => None,
        }
    }

    /// Returns the name of the instruction in messages.
    pub fn name(&self) -> String {
        match self {
            Op::UpdateAndAttend { layer, .. } => format!("UpdateAndAttend of layer {layer}"),
            Op::UpdateRecurrent(call) => {
                format!("{} of recurrent layer {}", call.kind(), call.layer)
            }
            Op::Call { function, .. } => function.name(),
            Op::MetalKernel { kernel, .. } => format!("MetalKernel {kernel}"),
            other => {
                let text = format!("{other:?}");
                text.split([' ', '{', '(']).next().unwrap_or_default().to_owned()
            }
        }
    }

    /// The name of the operation, without its fields.
    pub fn kind(&self) -> String {
        match self {
            Op::UpdateAndAttend { .. } => String::from("UpdateAndAttend"),
            Op::UpdateRecurrent(call) => call.kind().to_owned(),
            Op::Unary { function, .. } => format!("{function:?}"),
            Op::Binary { function, .. } => format!("{function:?}"),
            Op::IntBinary { function, .. } => format!("Int{function:?}"),
            other => other.name(),
        }
    }
}
