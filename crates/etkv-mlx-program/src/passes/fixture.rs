//! Small programs for the tests of the passes. Values are written as their numbers.

use mlx_rs::Dtype;

use crate::ir::{
    Binary, Chain, Constant, Dim, Function, Graph, InputSpec, Instruction, Int, IntValue, Op, Out,
    Unary, Value,
};

/// The number of tokens.
pub const COUNT: IntValue = IntValue(0);

/// The number that stands for [`COUNT`] in the sizes of a [`shape`].
pub const T: i64 = i64::MIN;

/// Returns a program of these instructions. Its output is the last result.
pub fn graph(made: impl IntoIterator<Item = (Op, Out)>) -> Graph {
    let instructions: Vec<Instruction> =
        made.into_iter().map(|(op, out)| Instruction { op, out }).collect();
    let outputs = instructions.last().map(|made| made.out).into_iter().collect();
    let main = Chain { instructions, outputs };
    let results = main.instructions.iter().flat_map(|made| made.out.tensors());
    let n_values = main.uses().chain(results).map(|value| value.0 + 1).max().unwrap_or(0);
    Graph { main, n_values, ..Graph::default() }
}

/// Returns operations whose results are the values `first` and up.
pub fn numbered(first: u32, ops: impl IntoIterator<Item = Op>) -> impl Iterator<Item = (Op, Out)> {
    (first..).zip(ops).map(|(out, op)| tensor(op, out))
}

pub fn tensor(op: Op, out: u32) -> (Op, Out) {
    (op, Out::Tensor(Value(out)))
}

pub fn tensors(values: &[u32]) -> Vec<Out> {
    values.iter().map(|&value| Out::Tensor(Value(value))).collect()
}

/// Returns the operations of the main chain.
pub fn ops(graph: &Graph) -> Vec<Op> {
    graph.main.instructions.iter().map(|made| made.op.clone()).collect()
}

/// Returns the operations of the main chain, by name.
pub fn kinds(graph: &Graph) -> Vec<String> {
    graph.main.instructions.iter().map(|made| made.op.kind()).collect()
}

/// Asserts that a pass leaves the instructions of a program as they are.
pub fn assert_stays(mut graph: Graph, pass: impl FnOnce(&mut Graph)) {
    let before = graph.main.instructions.clone();
    pass(&mut graph);
    assert_eq!(graph.main.instructions, before);
}

/// Returns a constant in float32.
pub fn constant(name: &str, shape: &[i32]) -> Constant {
    let (name, shape) = (name.to_owned(), shape.to_vec());
    Constant { name, shape, dtype: Dtype::Float32, joined: Vec::new() }
}

pub fn input(value: u32, shape: &[Dim], scalar_type: i8) -> InputSpec {
    let (value, name, shape) = (Value(value), String::from("input"), shape.to_vec());
    InputSpec::Tensor { value, name, shape, scalar_type }
}

pub fn unary(function: Unary, x: u32) -> Op {
    Op::Unary { function, x: Value(x) }
}

pub fn binary(function: Binary, a: u32, b: u32) -> Op {
    Op::Binary { function, a: Value(a), b: Value(b) }
}

pub fn add(a: u32, b: u32) -> Op {
    binary(Binary::Add, a, b)
}

pub fn multiply(a: u32, b: u32) -> Op {
    binary(Binary::Multiply, a, b)
}

pub fn as_type(x: u32, dtype: Dtype) -> Op {
    Op::AsType { x: Value(x), dtype }
}

pub fn expand(x: u32, axis: i32) -> Op {
    Op::ExpandDims { x: Value(x), axis }
}

pub fn shape(sizes: &[i64]) -> Vec<Int> {
    let size = |&size| if size == T { Int::Value(COUNT) } else { Int::Literal(size) };
    sizes.iter().map(size).collect()
}

pub fn reshape(x: u32, sizes: &[i64]) -> Op {
    Op::Reshape { x: Value(x), shape: shape(sizes) }
}

pub fn transpose(x: u32, perm: &[i32]) -> Op {
    Op::Transpose { x: Value(x), perm: perm.to_vec() }
}

/// Returns the view of features as heads, `[1, heads, T, head_dim]`.
pub fn view_heads(x: u32, head_dim: i64) -> Op {
    let shape = shape(&[1, T, -1, head_dim]);
    Op::ReshapeTranspose { x: Value(x), shape, perm: vec![0, 2, 1, 3] }
}

pub fn slice(x: u32, axis: i64, start: i64, stop: i64) -> Op {
    let [axis, start, stop] = [axis, start, stop].map(Int::Literal);
    Op::Slice { x: Value(x), axis, start, stop, step: 1 }
}

pub fn split(x: u32, axis: i32, at: &[i32], size: i32) -> Op {
    Op::Split { x: Value(x), axis, at: at.to_vec(), sizes: size..=size }
}

pub fn concatenate(tensors: &[u32], axis: i32) -> Op {
    Op::Concatenate { tensors: tensors.iter().copied().map(Value).collect(), axis }
}

pub fn linear(x: u32, weight: u32, bias: Option<u32>) -> Op {
    let (x, weight, bias) = (Value(x), Value(weight), bias.map(Value));
    Op::Linear { x, weight, bias, transposed: false }
}

pub fn rms_norm(x: u32, weight: Option<u32>, eps: f32) -> Op {
    Op::RmsNorm { x: Value(x), weight: weight.map(Value), eps }
}

pub fn attend(qkv: [u32; 3], position: u32) -> Op {
    let [q, k, v] = qkv.map(Value);
    Op::UpdateAndAttend {
        q,
        k,
        v,
        position: Value(position),
        layer: 0,
        scale: 1.0,
        softcap: None,
        sinks: None,
        out_dtype: None,
        last_query: false,
    }
}

pub fn call(function: Function, tensors: &[u32]) -> Op {
    let tensors = tensors.iter().copied().map(Value).collect();
    Op::Call { function, tensors, ints: Vec::new() }
}
