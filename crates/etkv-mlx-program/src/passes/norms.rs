//! Fuses each RMS norm that is computed in float32 with the conversions before and after it, and with a factor. Three
//! or four launches become one. For programs that the interpreter runs on a GPU.

use std::collections::HashMap;

use mlx_rs::{Array, Dtype};

use super::{dead, dtypes, maker, makers, Readers};
use crate::dtype::is_float;
use crate::ir::{Binary, Graph, Norm, Op, Out, Value};

/// Replaces norms of the main chain. `constants` are the loaded constants.
pub fn fuse(graph: &mut Graph, constants: &[Option<Array>]) {
    let finder = Finder {
        graph,
        constants,
        dtypes: dtypes::with_constants(graph, constants),
        readers: Readers::of(graph),
        makers: makers(graph),
    };
    let found: Vec<(usize, Op)> =
        (0..graph.main.instructions.len()).filter_map(|index| finder.norm(index)).collect();
    for (at, op) in found {
        graph.main.instructions[at].op = op;
    }
    dead::eliminate(graph);
}

struct Finder<'a> {
    graph: &'a Graph,
    constants: &'a [Option<Array>],
    dtypes: HashMap<Value, Dtype>,
    readers: Readers<'a>,
    makers: HashMap<Value, usize>,
}

impl Finder<'_> {
    /// Returns the norm at an index, fused with the operations around it, and the index of the instruction that it
    /// replaces.
    fn norm(&self, index: usize) -> Option<(usize, Op)> {
        let made = &self.graph.main.instructions[index];
        let (&Op::RmsNorm { x, weight, eps }, Out::Tensor(out)) = (&made.op, made.out) else {
            return None;
        };
        // MLX computes in float32 if any operand is float32.
        let operands = std::iter::once(x).chain(weight);
        let operands = operands.map(|value| self.dtypes.get(&value).copied());
        let operands: Vec<Dtype> = operands.collect::<Option<_>>()?;
        if !operands.contains(&Dtype::Float32) || !operands.iter().all(|&dtype| is_float(dtype)) {
            return None;
        }
        let source = self.before(x);
        let (mut at, mut result) = (index, out);
        let mut scale = None;
        if let Some((next, value, by)) = self.factor(result) {
            (at, result, scale) = (next, value, Some(by));
        }
        let mut dtype = Dtype::Float32;
        if let Some((next, to)) = self.conversion(result) {
            (at, dtype) = (next, to);
        }
        let converts = self.dtypes.get(&source) != Some(&Dtype::Float32);
        if at == index && !converts {
            return None;
        }
        let norm = Norm { weight, eps, in_float32: true };
        Some((at, Op::NormInFloat32 { x: source, norm, scale, dtype }))
    }

    /// Returns the operand of `x` if `x` is a conversion to float32; otherwise `x`.
    fn before(&self, x: Value) -> Value {
        match maker(self.graph, &self.makers, x) {
            Some(&Op::AsType { x: source, dtype: Dtype::Float32 })
                if self.dtypes.get(&source).is_some_and(|&dtype| is_float(dtype)) =>
            {
                source
            }
            _ => x,
        }
    }

    /// Returns the only reader of `value`, if it multiplies by a float32 constant of one element: its index, its
    /// result, and the constant.
    fn factor(&self, value: Value) -> Option<(usize, Value, Value)> {
        let (index, &Op::Binary { function: Binary::Multiply, a, b }, Out::Tensor(out)) =
            self.readers.reader(value)?
        else {
            return None;
        };
        let by = if a == value { b } else { a };
        let constant = self.constants.get(by.0 as usize)?.as_ref()?;
        // A constant with more axes than the rows would add axes to the result.
        (constant.size() == 1 && constant.ndim() < 2 && constant.dtype() == Dtype::Float32)
            .then_some((index, out, by))
    }

    /// Returns the only reader of `value`, if it converts to half precision: its index, and the dtype.
    fn conversion(&self, value: Value) -> Option<(usize, Dtype)> {
        match self.readers.reader(value)? {
            (index, &Op::AsType { dtype, .. }, _) if is_float(dtype) => Some((index, dtype)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{self, constant, tensor};
    use super::*;

    /// Constant 0 is the weight of a norm in float32, 1 a number, and 2 a list of two numbers. Values 3 and 4 are
    /// computed in bfloat16 and float32.
    fn fused(ops: Vec<(Op, u32)>) -> Vec<(Op, u32)> {
        let constants =
            [Array::ones::<f32>(&[6]), Array::ones::<f32>(&[]), Array::ones::<f32>(&[2])];
        let constants: Vec<Option<Array>> =
            constants.into_iter().map(|constant| Some(constant.unwrap())).collect();
        let known = |dtype, out| as_type(30, dtype, out);
        let made = [known(Dtype::Bfloat16, 3), known(Dtype::Float32, 4)].into_iter().chain(ops);
        let mut graph = Graph {
            constants: [&[6][..], &[], &[2]].map(|shape| constant("", shape)).to_vec(),
            init_targets: vec![Value(0)],
            ..fixture::graph(made.map(|(op, out)| tensor(op, out)))
        };
        fuse(&mut graph, &constants);
        let out = |out: Out| out.tensors().next().map_or(0, |value| value.0);
        let left = graph.main.instructions.into_iter().map(|made| (made.op, out(made.out)));
        left.filter(|(_, out)| *out > 4).collect()
    }

    fn norm(x: u32, weight: Option<u32>, out: u32) -> (Op, u32) {
        (fixture::rms_norm(x, weight, 1e-6), out)
    }

    fn as_type(x: u32, dtype: Dtype, out: u32) -> (Op, u32) {
        (fixture::as_type(x, dtype), out)
    }

    fn times(a: u32, b: u32, out: u32) -> (Op, u32) {
        (fixture::multiply(a, b), out)
    }

    fn whole(x: u32, weight: Option<u32>, scale: Option<u32>, dtype: Dtype, out: u32) -> (Op, u32) {
        let norm = Norm { weight: weight.map(Value), eps: 1e-6, in_float32: true };
        (Op::NormInFloat32 { x: Value(x), norm, scale: scale.map(Value), dtype }, out)
    }

    #[test]
    fn conversions_and_a_factor_are_part_of_the_norm() {
        let bf16 = Dtype::Bfloat16;
        let made = fused(vec![norm(3, Some(0), 5), as_type(5, bf16, 6)]);
        assert_eq!(made, [whole(3, Some(0), None, bf16, 6)]);
        let ops = vec![as_type(3, Dtype::Float32, 5), norm(5, None, 6), times(6, 1, 7)];
        assert_eq!(fused(ops), [whole(3, None, Some(1), Dtype::Float32, 7)]);
        let ops = vec![norm(4, None, 5), times(1, 5, 6), as_type(6, bf16, 7)];
        assert_eq!(fused(ops), [whole(4, None, Some(1), bf16, 7)]);
    }

    #[test]
    fn other_norms_stay() {
        // A norm in bfloat16, a norm with input and output in float32, and a norm of unknown dtype.
        for ops in [vec![norm(3, None, 5)], vec![norm(4, Some(0), 5)], vec![norm(20, Some(0), 5)]] {
            assert_eq!(fused(ops.clone()), ops);
        }
        // A factor for each feature, and a result with another reader.
        let made = fused(vec![norm(4, None, 5), times(5, 2, 6), as_type(6, Dtype::Float16, 7)]);
        assert_eq!(made.len(), 3);
        let made = fused(vec![norm(4, None, 5), as_type(5, Dtype::Float16, 6), times(6, 5, 7)]);
        assert_eq!(made.len(), 3);
    }
}
