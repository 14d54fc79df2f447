//! Removes instructions that repeat an earlier one.
//!
//! Exporters write the same conversion, view or size in each layer. Instructions that write to the cache or draw
//! random numbers stay. All others are functions of their operands.

use std::collections::HashMap;

use crate::ir::{Graph, Instruction, Int, IntValue, Op, Out, Value};

/// Removes repeated instructions of the main chain. Their readers read the result of the first one.
pub fn share(graph: &mut Graph) {
    let mut first = HashMap::<Key, Out>::new();
    let mut tensors = HashMap::<Value, Value>::new();
    let mut ints = HashMap::<IntValue, IntValue>::new();
    let old = std::mem::take(&mut graph.main.instructions);
    for Instruction { mut op, out } in old {
        rename(&mut op, &tensors, &ints);
        if !op.is_repeatable() {
            graph.main.instructions.push(Instruction { op, out });
            continue;
        }
        match (first.get(&Key::of(&op)), out) {
            (Some(Out::Tensor(same)), Out::Tensor(value)) => {
                tensors.insert(value, *same);
            }
            (Some(Out::Int(same)), Out::Int(value)) => {
                ints.insert(value, *same);
            }
            _ => {
                first.insert(Key::of(&op), out);
                graph.main.instructions.push(Instruction { op, out });
            }
        }
    }
    for out in &mut graph.main.outputs {
        match out {
            Out::Tensor(value) => *value = *tensors.get(value).unwrap_or(value),
            Out::Int(value) => *value = *ints.get(value).unwrap_or(value),
            Out::Tensors(..) => {}
        }
    }
}

fn rename(op: &mut Op, tensors: &HashMap<Value, Value>, ints: &HashMap<IntValue, IntValue>) {
    op.for_each_read(&mut |value| *value = *tensors.get(value).unwrap_or(value));
    op.for_each_int(&mut |int| {
        if let Int::Value(value) = int {
            *value = *ints.get(value).unwrap_or(value);
        }
    });
}

/// An operation as a key. Its text contains every field. Floats are written with all significant digits and the sign
/// of zero, so different floats have different texts.
#[derive(PartialEq, Eq, Hash)]
struct Key(String);

impl Key {
    fn of(op: &Op) -> Self {
        Self(format!("{op:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{Binary, Chain, IntBinary, Unary};

    fn graph(instructions: Vec<(Op, Out)>, outputs: Vec<Out>) -> Graph {
        Graph {
            main: Chain {
                instructions: instructions
                    .into_iter()
                    .map(|(op, out)| Instruction { op, out })
                    .collect(),
                outputs,
            },
            n_values: 20,
            n_ints: 20,
            ..Graph::default()
        }
    }

    fn unary(x: u32, out: u32) -> (Op, Out) {
        (Op::Unary { function: Unary::Cos, x: Value(x) }, Out::Tensor(Value(out)))
    }

    fn size(x: u32, out: u32) -> (Op, Out) {
        (Op::SymSize { x: Value(x), dim: 1 }, Out::Int(IntValue(out)))
    }

    fn twice(a: u32, out: u32) -> (Op, Out) {
        let op = Op::IntBinary {
            function: IntBinary::Multiply,
            a: Int::Value(IntValue(a)),
            b: Int::Literal(2),
        };
        (op, Out::Int(IntValue(out)))
    }

    fn norm(eps: f32, out: u32) -> (Op, Out) {
        (Op::RmsNorm { x: Value(0), weight: None, eps }, Out::Tensor(Value(out)))
    }

    #[test]
    fn work_is_done_once() {
        let sum = |a, b, out| {
            let op = Op::Binary { function: Binary::Add, a: Value(a), b: Value(b) };
            (op, Out::Tensor(Value(out)))
        };
        let reshape = |count, out| {
            let op = Op::Reshape { x: Value(0), shape: vec![Int::Value(IntValue(count))] };
            (op, Out::Tensor(Value(out)))
        };
        let mut graph = graph(
            vec![
                unary(0, 1),
                unary(0, 2),
                // Equal instructions. Their operands are results of equal instructions.
                sum(1, 2, 3),
                sum(2, 1, 4),
                size(0, 0),
                size(0, 1),
                twice(0, 2),
                twice(1, 3),
                reshape(2, 5),
                reshape(3, 6),
                sum(5, 6, 7),
            ],
            vec![Out::Tensor(Value(4)), Out::Tensor(Value(7)), Out::Int(IntValue(3))],
        );
        share(&mut graph);
        let left: Vec<Out> = graph.main.instructions.iter().map(|made| made.out).collect();
        let tensors = [1, 3, 5, 7].map(|value| Out::Tensor(Value(value)));
        let ints = [0, 2].map(|value| Out::Int(IntValue(value)));
        assert_eq!(left, [tensors[0], tensors[1], ints[0], ints[1], tensors[2], tensors[3]]);
        assert_eq!(graph.main.outputs, [tensors[1], tensors[3], ints[1]]);
        assert_eq!(graph.main.instructions[1].op.reads(), [Value(1); 2]);
        assert_eq!(graph.main.instructions[5].op.reads(), [Value(5); 2]);
    }

    #[test]
    fn what_differs_stays() {
        let nan = f32::from_bits(0x7fc0_0000);
        let ops = vec![norm(1e-5, 1), norm(1.000_000_1e-5, 2), norm(0.0, 3), norm(-0.0, 4)];
        let mut different = graph(ops.clone(), Vec::new());
        share(&mut different);
        assert_eq!(different.main.instructions.len(), 4);
        let mut same = graph(vec![norm(nan, 1), norm(nan, 2)], Vec::new());
        share(&mut same);
        assert_eq!(same.main.instructions.len(), 1);
    }

    #[test]
    fn every_write_to_the_cache_stays() {
        let attend = |out| {
            let op = Op::UpdateAndAttend {
                q: Value(0),
                k: Value(0),
                v: Value(0),
                position: Value(1),
                layer: 0,
                scale: 1.0,
                softcap: None,
                sinks: None,
                out_dtype: None,
                last_query: false,
            };
            (op, Out::Tensor(Value(out)))
        };
        let mut graph = graph(vec![attend(2), attend(3)], Vec::new());
        share(&mut graph);
        assert_eq!(graph.main.instructions.len(), 2);
    }
}
