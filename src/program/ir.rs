//! The instructions of a program, typed, over values each of which is written once.
//!
//! The payload reuses tensor slots, and an instruction may write the slot that it reads. Here every
//! write makes a new value. So "the value that linear 12 makes" is unique, and passes can reason
//! about uses.

use std::ops::RangeInclusive;

use mlx_rs::Dtype;

/// A tensor value: a constant, an input, or the result of one instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value(pub u32);

/// An integer value: an input, or the result of one instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IntValue(pub u32);

/// An integer argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Int {
    /// Known when the program was exported. `i64::MAX` means "to the end".
    Literal(i64),
    /// Known when the program runs.
    Value(IntValue),
}

/// Element-wise functions of one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Unary {
    Cos,
    Gelu,
    /// With tanh in place of the error function.
    GeluTanh,
    Neg,
    Sigmoid,
    Silu,
    Sin,
    Tanh,
}

/// Element-wise functions of two tensors, which broadcast.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    Divide,
    Multiply,
    Power,
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

/// The elements that `Take` takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Index {
    /// One element; the axis is removed.
    One(Int),
    /// The elements at the indices of a tensor.
    Many(Value),
}

/// The packing of affine-quantized rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Affine {
    /// Elements that share a scale and a bias.
    pub group_size: i32,
    /// Bits an element.
    pub bits: i32,
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
    /// One of the pieces of a Split: `start..stop` of an axis whose size is in `sizes`, or the
    /// program contradicts itself.
    Piece {
        x: Value,
        axis: i32,
        start: i32,
        stop: i32,
        sizes: RangeInclusive<i32>,
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
        out_dtype: Option<Dtype>,
        /// Made by a pass: only the last query's row is wanted.
        last_query: bool,
    },
    /// Made by a pass: `x` times the transpose of a weight `[out, in]`, or times a weight that is
    /// kept transposed, `[in, out]`.
    Linear {
        x: Value,
        weight: Value,
        bias: Option<Value>,
        transposed: bool,
    },
    /// Made by a pass: rows of a weight that is kept transposed.
    TakeTransposed {
        x: Value,
        index: Value,
    },
    /// Made by a pass: the rotary embedding of `x`, `[1, heads, T, head_dim]`, whose token `i` is at
    /// `offsets[i]`, in `dtype`. Element `j` turns together with `head_dim / 2 + j`, by `1 /
    /// periods[j]` a position.
    Rotary {
        x: Value,
        offsets: Value,
        periods: Value,
        dtype: Dtype,
    },
    /// Made by a pass: one over each element of a constant, in one axis.
    RotaryPeriods {
        inverse: Value,
    },
    /// Made by a pass: the last row of the tokens' axis, the second of `x`.
    LastToken {
        x: Value,
    },
    SymSize {
        x: Value,
        dim: i32,
    },
    IntBinary {
        function: IntBinary,
        a: Int,
        b: Int,
    },
}

impl Op {
    /// Calls `visit` with every tensor that the instruction reads.
    pub fn for_each_read(&mut self, mut visit: impl FnMut(&mut Value)) {
        match self {
            Op::Unary { x, .. }
            | Op::AsType { x, .. }
            | Op::ExpandDims { x, .. }
            | Op::Reshape { x, .. }
            | Op::Transpose { x, .. }
            | Op::Slice { x, .. }
            | Op::Piece { x, .. }
            | Op::LastToken { x }
            | Op::RotaryPeriods { inverse: x }
            | Op::SymSize { x, .. } => visit(x),
            Op::Binary { a, b, .. } => {
                visit(a);
                visit(b);
            }
            Op::Concatenate { tensors, .. } => tensors.iter_mut().for_each(visit),
            Op::Take { x, index, .. } => {
                visit(x);
                if let Index::Many(indices) = index {
                    visit(indices);
                }
            }
            Op::TakeTransposed { x, index } => {
                visit(x);
                visit(index);
            }
            Op::Rotary { x, offsets, periods, .. } => {
                visit(x);
                visit(offsets);
                visit(periods);
            }
            Op::RmsNorm { x, weight, .. } => {
                visit(x);
                weight.iter_mut().for_each(visit);
            }
            Op::LayerNorm { x, weight, bias, .. } => {
                visit(x);
                weight.iter_mut().for_each(&mut visit);
                bias.iter_mut().for_each(visit);
            }
            Op::Addmm { mat1, mat2, bias, .. } => {
                visit(mat1);
                visit(mat2);
                bias.iter_mut().for_each(visit);
            }
            Op::Linear { x, weight, bias, .. } => {
                visit(x);
                visit(weight);
                bias.iter_mut().for_each(visit);
            }
            Op::QuantizedMatmul { x, w, scales, biases, .. } => {
                visit(x);
                visit(w);
                visit(scales);
                biases.iter_mut().for_each(visit);
            }
            Op::Dequantize { w, scales, biases, .. } => {
                visit(w);
                visit(scales);
                biases.iter_mut().for_each(visit);
            }
            Op::UpdateAndAttend { q, k, v, position, .. } => {
                visit(q);
                visit(k);
                visit(v);
                visit(position);
            }
            Op::IntBinary { .. } => {}
        }
    }

    /// Calls `visit` with every integer argument.
    pub fn for_each_int(&mut self, mut visit: impl FnMut(&mut Int)) {
        match self {
            Op::Reshape { shape, .. } => shape.iter_mut().for_each(visit),
            Op::Slice { axis, start, stop, .. } => {
                visit(axis);
                visit(start);
                visit(stop);
            }
            Op::IntBinary { a, b, .. } => {
                visit(a);
                visit(b);
            }
            Op::Take { index: Index::One(index), .. } => visit(index),
            _ => {}
        }
    }

    /// Returns the integer values that the instruction reads.
    pub fn int_reads(&self) -> Vec<IntValue> {
        let mut values = Vec::new();
        self.clone().for_each_int(|int| {
            if let Int::Value(value) = int {
                values.push(*value);
            }
        });
        values
    }

    /// Returns the tensors that the instruction reads.
    pub fn reads(&self) -> Vec<Value> {
        let mut values = Vec::new();
        self.clone().for_each_read(|value| values.push(*value));
        values
    }

    /// Returns the name of the instruction in messages.
    pub fn name(&self) -> String {
        match self {
            Op::UpdateAndAttend { layer, .. } => format!("UpdateAndAttend of layer {layer}"),
            other => {
                let text = format!("{other:?}");
                text.split([' ', '{']).next().unwrap_or_default().to_owned()
            }
        }
    }

    /// The name of the operation, the same for all of its kind.
    pub fn kind(&self) -> String {
        match self {
            Op::UpdateAndAttend { .. } => String::from("UpdateAndAttend"),
            Op::Unary { function, .. } => format!("{function:?}"),
            Op::Binary { function, .. } => format!("{function:?}"),
            Op::IntBinary { function, .. } => format!("Int{function:?}"),
            other => other.name(),
        }
    }
}

/// The result of an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Out {
    /// A tensor.
    Tensor(Value),
    /// An integer.
    Int(IntValue),
}

/// An operation and its result.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub struct Instruction {
    pub op: Op,
    pub out: Out,
}

/// A constant of the program.
#[derive(Debug, Clone)]
pub struct Constant {
    /// Its key in the program's data.
    pub name: String,
    /// Its shape.
    pub shape: Vec<i32>,
    /// Its dtype.
    pub dtype: Dtype,
}

/// A dimension of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dim {
    /// The dimension is always this.
    Static(i32),
    /// The dimension is at most this, if there is a limit. The exporter's lower limit belongs to
    /// its tracing: programs also run on one token.
    UpTo(Option<i32>),
}

/// An input of the program.
#[derive(Debug, Clone)]
pub enum InputSpec {
    /// A tensor, and the value that it becomes.
    Tensor {
        /// The value that it becomes.
        value: Value,
        /// The name in messages.
        name: String,
        /// Its shape.
        shape: Vec<Dim>,
        /// ExecuTorch's number of its dtype.
        scalar_type: i8,
    },
    /// An integer, and the value that it becomes.
    Int(IntValue),
}

/// A straight run of instructions and its outputs.
#[derive(Debug, Clone, Default)]
pub struct Chain {
    /// The instructions, in order.
    pub instructions: Vec<Instruction>,
    /// The outputs.
    pub outputs: Vec<Out>,
}

impl Chain {
    /// Returns the output tensors.
    pub fn tensor_outputs(&self) -> impl Iterator<Item = Value> + '_ {
        self.outputs.iter().filter_map(|out| match out {
            Out::Tensor(value) => Some(*value),
            Out::Int(_) => None,
        })
    }

    /// Returns every use of a tensor: by the instructions, and as an output.
    pub fn uses(&self) -> impl Iterator<Item = Value> + '_ {
        let read = self.instructions.iter().flat_map(|instruction| instruction.op.reads());
        read.chain(self.tensor_outputs())
    }
}

/// A program. Values `0..constants.len()` are its constants, the next ones its tensor inputs, and
/// instructions make the rest.
#[derive(Debug, Clone)]
pub struct Graph {
    /// Constants, in the order of their values.
    pub constants: Vec<Constant>,
    /// Inputs, in the order of the arguments.
    pub inputs: Vec<InputSpec>,
    /// Runs once, when the program is loaded. Its outputs replace constants.
    pub init: Chain,
    /// The constants that `init`'s outputs replace.
    pub init_targets: Vec<Value>,
    /// Runs at every call.
    pub main: Chain,
    /// The number of tensor values.
    pub n_values: u32,
    /// The number of integer values.
    pub n_ints: u32,
}

impl Graph {
    /// Returns whether `value` is a constant.
    pub fn is_constant(&self, value: Value) -> bool {
        (value.0 as usize) < self.constants.len()
    }

    /// Returns a new value.
    pub fn new_value(&mut self) -> Value {
        self.n_values += 1;
        Value(self.n_values - 1)
    }
}
