//! The instructions of a program, typed, over values that are each written once.
//!
//! The payload reuses tensor slots, and an instruction may write the slot that it reads. Here every write creates a
//! new value. So each value has one definition, and passes can reason about uses.

mod expression;
mod function;
mod metal;
mod op;
mod recurrent;

use std::collections::HashMap;

use mlx_rs::Dtype;

pub use expression::{Expression, Node};
pub use function::{
    Convolution, Fill, Function, OneAxis, Packing, PackingMode, PadMode, Reduction,
};
pub use metal::{Gguf, MetalKernel};
pub use op::{Affine, Binary, Heads, Index, IntBinary, Norm, Op, Scan, Unary};
pub use recurrent::{RecurrentCall, RecurrentFunction, ScanNumbers, ScanRows};

/// A tensor value: a constant, an input, or the result of one instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value(pub u32);

/// An integer value: an input, or the result of one instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IntValue(pub u32);

/// An integer argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Int {
    /// Constant since the export. `i64::MAX` means "to the end".
    Literal(i64),
    /// Known when the program runs.
    Value(IntValue),
}

/// The result of an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Out {
    /// A tensor.
    Tensor(Value),
    /// Several tensors: this value and the following ones. The integer is the number of tensors. Such results
    /// are never outputs of a chain.
    Tensors(Value, u32),
    /// An integer.
    Int(IntValue),
}

impl Out {
    /// Returns the tensors of the result.
    pub fn tensors(self) -> impl Iterator<Item = Value> {
        let (first, n) = match self {
            Out::Tensor(value) => (value.0, 1),
            Out::Tensors(value, n) => (value.0, n),
            Out::Int(_) => (0, 0),
        };
        (first..first + n).map(Value)
    }
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
    /// The key in the program's data.
    pub name: String,
    /// Its shape.
    pub shape: Vec<i32>,
    /// Its dtype.
    pub dtype: Dtype,
    /// Set by a pass: constants whose rows follow the rows of this constant. All have the same shape except for the
    /// number of rows. `shape` counts only the rows of this constant.
    pub joined: Vec<Constant>,
}

/// A dimension of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dim {
    /// The dimension always has this size.
    Static(i32),
    /// The dimension has at most this size, if there is a limit. The exporter's lower limit is an artifact of
    /// tracing: programs also run on one token.
    UpTo(Option<i32>),
}

/// An input of the program.
#[derive(Debug, Clone)]
pub enum InputSpec {
    /// A tensor, and its value.
    Tensor {
        /// The value of the input.
        value: Value,
        /// The name in messages.
        name: String,
        /// Its shape.
        shape: Vec<Dim>,
        /// ExecuTorch's number of its dtype.
        scalar_type: i8,
    },
    /// An integer, and its value.
    Int(IntValue),
}

/// A sequence of instructions without branches, and its outputs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Chain {
    /// The instructions, in order.
    pub instructions: Vec<Instruction>,
    /// The outputs.
    pub outputs: Vec<Out>,
}

/// A tensor that a program keeps between calls, such as the rows of a cache in its graph.
#[derive(Debug, Clone)]
pub struct Buffer {
    /// Its name in the program.
    pub name: String,
    /// Its shape.
    pub shape: Vec<i32>,
    /// Its dtype. Its elements are initially zero.
    pub dtype: Dtype,
    /// Its value at the beginning of a call.
    pub value: Value,
}

impl Chain {
    /// Calls `visit` with every tensor that the chain reads or writes. If an instruction writes several tensors, only
    /// the first is visited.
    pub fn for_each_value(&mut self, visit: &mut dyn FnMut(&mut Value)) {
        for instruction in &mut self.instructions {
            instruction.op.for_each_read(visit);
            if let Out::Tensor(value) | Out::Tensors(value, _) = &mut instruction.out {
                visit(value);
            }
        }
        for out in &mut self.outputs {
            if let Out::Tensor(value) = out {
                visit(value);
            }
        }
    }

    /// Returns the output tensors.
    pub fn tensor_outputs(&self) -> impl Iterator<Item = Value> + '_ {
        self.outputs.iter().flat_map(|out| out.tensors())
    }

    /// Returns how often each tensor is used.
    pub fn n_uses(&self) -> HashMap<Value, usize> {
        let mut counts = HashMap::new();
        for value in self.uses() {
            *counts.entry(value).or_default() += 1;
        }
        counts
    }

    /// Returns every use of a tensor: by the instructions, and as an output.
    pub fn uses(&self) -> impl Iterator<Item = Value> + '_ {
        let read = self.instructions.iter().flat_map(|instruction| instruction.op.reads());
        read.chain(self.tensor_outputs())
    }
}

/// A program. Values `0..constants.len()` are its constants, followed by its tensor inputs, its buffers, and the
/// results of instructions.
#[derive(Debug, Clone, Default)]
pub struct Graph {
    /// Constants, in the order of their values.
    pub constants: Vec<Constant>,
    /// Inputs, in the order of the arguments.
    pub inputs: Vec<InputSpec>,
    /// Runs once, when the program is loaded. Its outputs replace constants.
    pub init: Chain,
    /// The constants that the outputs of `init` replace.
    pub init_targets: Vec<Value>,
    /// Runs at every call. Its outputs are those of the program, followed by the value of each buffer after
    /// the call.
    pub main: Chain,
    /// The tensors that the program keeps between calls.
    pub buffers: Vec<Buffer>,
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
        self.new_values(1)
    }

    /// Returns the first of `n` new consecutive values.
    pub fn new_values(&mut self, n: u32) -> Value {
        self.n_values += n;
        Value(self.n_values - n)
    }

    /// Replaces each value in `renamed` by its new value wherever the main chain reads it.
    pub fn rename(&mut self, renamed: &HashMap<Value, Value>) {
        if renamed.is_empty() {
            return;
        }
        let rename = |value: &mut Value| *value = *renamed.get(value).unwrap_or(value);
        for instruction in &mut self.main.instructions {
            instruction.op.for_each_read(&mut { rename });
        }
        for out in &mut self.main.outputs {
            if let Out::Tensor(value) = out {
                rename(value);
            }
        }
    }

    /// Moves the instructions `made` to the init chain: their results become constants.
    ///
    /// Constants come first, so all other values are renumbered.
    pub fn make_at_load(&mut self, made: Vec<Instruction>) {
        let (old, n) = (self.constants.len() as u32, made.len() as u32);
        let moved = |value: &mut Value| {
            if value.0 >= old {
                value.0 += n;
            }
        };
        self.n_values += n;
        self.init.instructions.extend(made.iter().cloned());
        self.init.outputs.extend(made.iter().map(|instruction| instruction.out));
        self.init_targets.extend((old..old + n).map(Value));
        self.init.for_each_value(&mut { moved });
        self.main.for_each_value(&mut { moved });
        for input in &mut self.inputs {
            if let InputSpec::Tensor { value, .. } = input {
                moved(value);
            }
        }
        self.buffers.iter_mut().for_each(|buffer| moved(&mut buffer.value));
        let mut constant_of = HashMap::new();
        for (constant, instruction) in (old..).zip(made) {
            constant_of.extend(
                instruction.out.tensors().map(|value| (Value(value.0 + n), Value(constant))),
            );
            self.constants.push(Constant {
                name: format!("result of {}", instruction.op.name()),
                shape: Vec::new(),
                dtype: Dtype::Float32,
                joined: Vec::new(),
            });
        }
        self.rename(&constant_of);
    }
}
