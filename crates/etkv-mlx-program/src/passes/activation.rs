//! Fuses activations, and their products with the other half of a gate, into one compiled kernel.
//!
//! MLX launches two kernels for SiLU, nine for GELU, and one for the product. Some exporters write GELU as a formula.
//! On a GPU, each launch costs the host microseconds.

use std::collections::HashMap;

use mlx_rs::Dtype;

use super::{dead, dtypes, maker, makers};
use crate::ir::{Binary, Graph, Op, Out, Unary, Value};

/// Replaces activations of the main chain by one instruction each. `scalars` are the values of
/// constants of one element.
pub fn fuse(graph: &mut Graph, scalars: &HashMap<Value, f32>) {
    written_out(graph, scalars);
    products(graph);
    for instruction in &mut graph.main.instructions {
        if let Op::Unary { function, x } = instruction.op {
            if is_activation(function) {
                instruction.op = Op::Activation { function, x, by: None };
            }
        }
    }
    dead::eliminate(graph);
}

fn is_activation(function: Unary) -> bool {
    matches!(function, Unary::Silu | Unary::Gelu | Unary::GeluTanh)
}

/// Joins each activation with the product that is its only reader.
fn products(graph: &mut Graph) {
    let n_uses = graph.main.n_uses();
    let makers = makers(graph);
    for index in 0..graph.main.instructions.len() {
        let Op::Binary { function: Binary::Multiply, a, b } = graph.main.instructions[index].op
        else {
            continue;
        };
        let activation = |activated, by| match *maker(graph, &makers, activated)? {
            Op::Unary { function, x }
                if is_activation(function) && n_uses.get(&activated) == Some(&1) =>
            {
                Some(Op::Activation { function, x, by: Some(by) })
            }
            _ => None,
        };
        if let Some(op) = activation(a, b).or_else(|| activation(b, a)) {
            graph.main.instructions[index].op = op;
        }
    }
}

/// Recognises GELU that is written as a formula with tanh in float32. In half precision the formula would round at
/// each step.
fn written_out(graph: &mut Graph, scalars: &HashMap<Value, f32>) {
    let dtypes = dtypes::known(graph);
    let found: Vec<(usize, Value)> = {
        let formula = Formula { graph, makers: makers(graph), scalars };
        let instructions = graph.main.instructions.iter().enumerate();
        instructions
            .filter(|(_, made)| matches!(made.out, Out::Tensor(_)))
            .filter_map(|(index, made)| Some((index, formula.gelu(&made.op)?)))
            .filter(|(_, x)| dtypes.get(x) == Some(&Dtype::Float32))
            .collect()
    };
    for (index, x) in found {
        graph.main.instructions[index].op = Op::Unary { function: Unary::GeluTanh, x };
    }
}

struct Formula<'a> {
    graph: &'a Graph,
    makers: HashMap<Value, usize>,
    scalars: &'a HashMap<Value, f32>,
}

impl Formula<'_> {
    fn op(&self, value: Value) -> Option<&Op> {
        maker(self.graph, &self.makers, value)
    }

    /// Returns the operands of a binary instruction, in both orders.
    fn both(&self, op: &Op, wanted: Binary) -> Option<[(Value, Value); 2]> {
        match *op {
            Op::Binary { function, a, b } if function == wanted => Some([(a, b), (b, a)]),
            _ => None,
        }
    }

    fn is(&self, value: Value, expected: f32) -> bool {
        let found = self.scalars.get(&value);
        found.is_some_and(|found| (found - expected).abs() <= expected.abs() * 1e-6)
    }

    /// Returns `x` if `value` is `x` times or plus this constant.
    fn with(&self, value: Value, function: Binary, constant: f32) -> Option<Value> {
        let both = self.both(self.op(value)?, function)?;
        both.into_iter().find_map(|(x, other)| self.is(other, constant).then_some(x))
    }

    /// Returns `x` if the instruction is `(x / 2) * (1 + tanh(c * (x + 0.044715 * x^3)))`.
    fn gelu(&self, op: &Op) -> Option<Value> {
        self.both(op, Binary::Multiply)?.into_iter().find_map(|(half, bell)| {
            let x = self.with(half, Binary::Multiply, 0.5)?;
            let tanh = self.with(bell, Binary::Add, 1.0)?;
            let Op::Unary { function: Unary::Tanh, x: inner } = *self.op(tanh)? else {
                return None;
            };
            let sum = self.with(inner, Binary::Multiply, 0.797_884_6)?;
            let terms = self.both(self.op(sum)?, Binary::Add)?;
            terms.into_iter().find_map(|(first, second)| {
                let cube = self.with(second, Binary::Multiply, 0.044_715)?;
                let Op::Binary { function: Binary::Power, a, b } = *self.op(cube)? else {
                    return None;
                };
                (first == x && a == x && self.is(b, 3.0)).then_some(x)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{
        self, add, binary, constant, input, multiply, numbered, ops, unary,
    };
    use super::*;
    use crate::ir::Dim;

    const SCALARS: [f32; 5] = [0.5, 1.0, 0.797_884_6, 0.044_715, 3.0];

    /// Values 0 to 4 are constants, and 5 is the input. The results of `ops` are the values 6 and up. The last one is
    /// the output.
    fn graph(ops: Vec<Op>) -> Graph {
        Graph {
            constants: SCALARS.iter().map(|_| constant("", &[])).collect(),
            inputs: vec![input(5, &[Dim::UpTo(None)], 6)],
            ..fixture::graph(numbered(6, ops))
        }
    }

    fn fused(before: Vec<Op>, scalars: [f32; 5]) -> Vec<Op> {
        let mut graph = graph(before);
        fuse(&mut graph, &(0..).map(Value).zip(scalars).collect());
        ops(&graph)
    }

    fn formula() -> Vec<Op> {
        vec![
            multiply(5, 0),              // 6
            binary(Binary::Power, 5, 4), // 7
            multiply(3, 7),              // 8
            add(8, 5),                   // 9
            multiply(9, 2),              // 10
            unary(Unary::Tanh, 10),      // 11
            add(11, 1),                  // 12
            multiply(6, 12),             // 13
        ]
    }

    #[test]
    fn an_activation_and_its_product_are_one_instruction() {
        let gate = vec![unary(Unary::Silu, 5), multiply(5, 6)];
        let (x, by) = (Value(5), Some(Value(5)));
        let function = Unary::Silu;
        assert_eq!(fused(gate, SCALARS), [Op::Activation { function, x, by }]);
        // Another reader needs the activation itself.
        let twice = vec![unary(Unary::Silu, 5), multiply(5, 6), add(6, 7)];
        let made = fused(twice.clone(), SCALARS);
        assert_eq!(made[0], Op::Activation { function, x, by: None });
        assert_eq!(made[1..], twice[1..]);
        assert_eq!(fused(vec![unary(Unary::Cos, 5)], SCALARS), [unary(Unary::Cos, 5)]);
    }

    #[test]
    fn a_formula_of_gelu_is_one_instruction() {
        let gelu = Op::Activation { function: Unary::GeluTanh, x: Value(5), by: None };
        assert_eq!(fused(formula(), SCALARS), [gelu]);
    }

    #[test]
    fn other_formulas_stay() {
        for index in 0..SCALARS.len() {
            let mut scalars = SCALARS;
            scalars[index] *= 1.01;
            assert_eq!(fused(formula(), scalars), formula(), "{index}");
        }
        let mut cubes_another = formula();
        cubes_another[1] = binary(Binary::Power, 6, 4);
        assert_eq!(fused(cubes_another.clone(), SCALARS), cubes_another);
        // In half precision the formula rounds at each instruction.
        let mut half = graph(formula());
        half.inputs = vec![input(5, &[Dim::UpTo(None)], 5)];
        fuse(&mut half, &(0..).map(Value).zip(SCALARS).collect());
        assert_eq!(half.main.instructions.len(), formula().len());
    }
}
