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
    use super::super::fixture::{self, add, attend, rms_norm, tensor, tensors, unary};
    use super::*;
    use crate::ir::{IntBinary, Unary};

    fn size(x: u32, out: u32) -> (Op, Out) {
        (Op::SymSize { x: Value(x), dim: 1 }, Out::Int(IntValue(out)))
    }

    fn twice(a: u32, out: u32) -> (Op, Out) {
        let (a, b) = (Int::Value(IntValue(a)), Int::Literal(2));
        (Op::IntBinary { function: IntBinary::Multiply, a, b }, Out::Int(IntValue(out)))
    }

    /// Returns the number of instructions after the pass.
    fn n_left(ops: impl IntoIterator<Item = Op>) -> usize {
        let mut graph = fixture::graph(fixture::numbered(1, ops));
        share(&mut graph);
        graph.main.instructions.len()
    }

    #[test]
    fn work_is_done_once() {
        let reshape = |count, out| {
            let shape = vec![Int::Value(IntValue(count))];
            tensor(Op::Reshape { x: Value(0), shape }, out)
        };
        let mut graph = fixture::graph([
            tensor(unary(Unary::Cos, 0), 1),
            tensor(unary(Unary::Cos, 0), 2),
            // Equal instructions. Their operands are results of equal instructions.
            tensor(add(1, 2), 3),
            tensor(add(2, 1), 4),
            size(0, 0),
            size(0, 1),
            twice(0, 2),
            twice(1, 3),
            reshape(2, 5),
            reshape(3, 6),
            tensor(add(5, 6), 7),
        ]);
        let [first, second] = [0, 2].map(|value| Out::Int(IntValue(value)));
        graph.main.outputs = [tensors(&[4, 7]), vec![Out::Int(IntValue(3))]].concat();
        share(&mut graph);
        let left: Vec<Out> = graph.main.instructions.iter().map(|made| made.out).collect();
        assert_eq!(left, [tensors(&[1, 3]), vec![first, second], tensors(&[5, 7])].concat());
        assert_eq!(graph.main.outputs, [tensors(&[3, 7]), vec![second]].concat());
        assert_eq!(graph.main.instructions[1].op.reads(), [Value(1); 2]);
        assert_eq!(graph.main.instructions[5].op.reads(), [Value(5); 2]);
    }

    #[test]
    fn what_differs_stays() {
        let norm = |eps| rms_norm(0, None, eps);
        assert_eq!(n_left([1e-5, 1.000_000_1e-5, 0.0, -0.0].map(norm)), 4);
        assert_eq!(n_left([f32::from_bits(0x7fc0_0000); 2].map(norm)), 1);
    }

    #[test]
    fn every_write_to_the_cache_stays() {
        assert_eq!(n_left([attend([0; 3], 1), attend([0; 3], 1)]), 2);
    }
}
