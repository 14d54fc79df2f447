//! Removes instructions whose results nothing reads.

use std::collections::HashSet;

use crate::ir::{Graph, IntValue, Out, Value};

/// Removes unused instructions of the main chain. Instructions that write to the cache stay.
pub fn eliminate(graph: &mut Graph) {
    let mut tensors: HashSet<Value> = HashSet::new();
    let mut ints: HashSet<IntValue> = HashSet::new();
    for out in &graph.main.outputs {
        tensors.extend(out.tensors());
        if let Out::Int(value) = out {
            ints.insert(*value);
        }
    }
    let mut kept = Vec::new();
    for instruction in std::mem::take(&mut graph.main.instructions).into_iter().rev() {
        let wanted = match instruction.out {
            Out::Int(value) => ints.contains(&value),
            out => out.tensors().any(|value| tensors.contains(&value)),
        };
        if wanted || instruction.op.writes_cache() {
            tensors.extend(instruction.op.reads());
            ints.extend(instruction.op.int_reads());
            kept.push(instruction);
        }
    }
    kept.reverse();
    graph.main.instructions = kept;
}
