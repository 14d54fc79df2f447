//! The instructions of a program, typed, over values that are written once.
//!
//! The payload reuses tensor slots, and an instruction may write the slot that it
//! reads. Here every write makes a new value, so that "the value that linear 12
//! makes" means one thing, and passes can reason about uses.

use std::ops::RangeInclusive;

use mlx_rs::Dtype;

/// A tensor value: a constant, an input, or what one instruction makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value(pub u32);

/// An integer value: an input, or what one instruction makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IntValue(pub u32);

/// An integer argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Int {
    /// Known when the program was made. `i64::MAX` means "to the end".
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
    /// With a tangent in the place of the error function.
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

/// Which elements `Take` takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Index {
    /// One element: the axis goes.
    One(Int),
    /// The elements at the indices of a tensor.
    Many(Value),
}

/// How affine-quantized rows are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Affine {
    /// Elements that share a scale and a bias.
    pub group_size: i32,
    /// Bits an element.
    pub bits: i32,
}

/// What an instruction does. Fields are named as in ExecuTorch's schema, which
/// says what they mean.
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
    /// One of the pieces that a Split makes: `start..stop` of an axis whose size
    /// is in `sizes`, or the program contradicts itself.
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
    /// Made by a pass: `x` by the transpose of a weight `[out, in]`, or by one
    /// that is kept transposed already, `[in, out]`.
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

    /// The tensors that the instruction reads.
    pub fn reads(&self) -> Vec<Value> {
        let mut values = Vec::new();
        self.clone().for_each_read(|value| values.push(*value));
        values
    }

    /// The name of the instruction in messages.
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

/// What an instruction makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Out {
    /// A tensor.
    Tensor(Value),
    /// An integer.
    Int(IntValue),
}

/// An operation and what it makes.
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
    /// Always this.
    Static(i32),
    /// At most this, where there is a limit. The exporter's lower limit is of
    /// its tracing only: programs run on one token.
    UpTo(Option<i32>),
}

/// An input of the program.
#[derive(Debug, Clone)]
pub enum InputSpec {
    /// A tensor, and the value that it becomes.
    Tensor {
        /// The value that it becomes.
        value: Value,
        /// For messages.
        name: String,
        /// Its shape.
        shape: Vec<Dim>,
        /// ExecuTorch's number of its dtype.
        scalar_type: i8,
    },
    /// An integer, and the value that it becomes.
    Int(IntValue),
}

/// A straight run of instructions and what it leaves behind.
#[derive(Debug, Clone, Default)]
pub struct Chain {
    /// In order.
    pub instructions: Vec<Instruction>,
    /// What it makes for others.
    pub outputs: Vec<Out>,
}

impl Chain {
    /// The tensors that it makes for others.
    pub fn tensor_outputs(&self) -> impl Iterator<Item = Value> + '_ {
        self.outputs.iter().filter_map(|out| match out {
            Out::Tensor(value) => Some(*value),
            Out::Int(_) => None,
        })
    }

    /// Every use of a tensor: by the instructions, and as an output.
    pub fn uses(&self) -> impl Iterator<Item = Value> + '_ {
        let read = self.instructions.iter().flat_map(|instruction| instruction.op.reads());
        read.chain(self.tensor_outputs())
    }
}

/// A program: values `0..constants.len()` are its constants, those after them
/// its tensor inputs, the rest are made by instructions.
#[derive(Debug, Clone)]
pub struct Graph {
    /// Constants, in the order of their values.
    pub constants: Vec<Constant>,
    /// Inputs, in the order of the arguments.
    pub inputs: Vec<InputSpec>,
    /// Runs once, when the program is loaded: which constant each of its outputs
    /// replaces.
    pub init: Chain,
    /// The constants that `init`'s outputs replace.
    pub init_targets: Vec<Value>,
    /// Runs at every call.
    pub main: Chain,
    /// Tensor values in all.
    pub n_values: u32,
    /// Integer values in all.
    pub n_ints: u32,
}

impl Graph {
    /// Whether `value` is a constant.
    pub fn is_constant(&self, value: Value) -> bool {
        (value.0 as usize) < self.constants.len()
    }

    /// A value that nothing has made yet.
    pub fn new_value(&mut self) -> Value {
        self.n_values += 1;
        Value(self.n_values - 1)
    }
}
