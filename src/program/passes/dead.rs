//! Removes instructions whose results nothing reads.

use std::collections::HashSet;

use crate::program::ir::{Graph, Int, IntValue, Op, Out, Value};

/// Removes them from the main chain. Writing to the cache counts as a use.
pub fn eliminate(graph: &mut Graph) {
    let mut tensors: HashSet<Value> = HashSet::new();
    let mut ints: HashSet<IntValue> = HashSet::new();
    for out in &graph.main.outputs {
        match out {
            Out::Tensor(value) => tensors.insert(*value),
            Out::Int(value) => ints.insert(*value),
        };
    }
    let mut kept = Vec::new();
    for instruction in std::mem::take(&mut graph.main.instructions).into_iter().rev() {
        let wanted = match instruction.out {
            Out::Tensor(value) => tensors.contains(&value),
            Out::Int(value) => ints.contains(&value),
        };
        if wanted || matches!(instruction.op, Op::UpdateAndAttend { .. }) {
            tensors.extend(instruction.op.reads());
            ints.extend(int_reads(&instruction.op));
            kept.push(instruction);
        }
    }
    kept.reverse();
    graph.main.instructions = kept;
}

fn int_reads(op: &Op) -> Vec<IntValue> {
    let arguments = match op {
        Op::Reshape { shape, .. } => shape.clone(),
        Op::Slice { axis, start, stop, .. } => vec![*axis, *start, *stop],
        Op::IntBinary { a, b, .. } => vec![*a, *b],
        Op::Take { index: crate::program::ir::Index::One(index), .. } => vec![*index],
        _ => Vec::new(),
    };
    arguments
        .into_iter()
        .filter_map(|argument| match argument {
            Int::Value(value) => Some(value),
            Int::Literal(_) => None,
        })
        .collect()
}
