//! Computes at load what is the same in every step.
//!
//! Nothing that an input leads to is the same in two steps, so this is what constants alone lead to:
//! the periods of rotary embedding, a norm's weight plus one, conversions of scalars.

use std::collections::{HashMap, HashSet};

use crate::program::ir::{Constant, Graph, Op, Out, Value};

/// The most elements that a result may have. Results are kept beside the constants that they are
/// made of, and weights must not be there twice.
const MAX_ELEMENTS: u64 = 1 << 18;

/// Moves instructions whose operands are small constants to the load.
pub fn fold(graph: &mut Graph) {
    let mut sizes = HashMap::<Value, u64>::new();
    let written: HashSet<Value> = graph.init_targets.iter().copied().collect();
    for (value, constant) in (0..).map(Value).zip(&graph.constants) {
        let elements = elements(constant).filter(|_| !written.contains(&value));
        sizes.extend(elements.map(|n| (value, n)));
    }
    let outputs: HashSet<Value> = graph.main.tensor_outputs().collect();
    let (mut made, mut left) = (Vec::new(), Vec::new());
    for instruction in std::mem::take(&mut graph.main.instructions) {
        match (instruction.out, result_size(&instruction.op, &sizes)) {
            (Out::Tensor(value), Some(n)) if n <= MAX_ELEMENTS && !outputs.contains(&value) => {
                sizes.insert(value, n);
                made.push(instruction);
            }
            _ => left.push(instruction),
        }
    }
    graph.main.instructions = left;
    if !made.is_empty() {
        graph.make_at_load(made);
    }
}

fn elements(constant: &Constant) -> Option<u64> {
    constant.shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(u64::try_from(dim).ok()?))
}

/// Returns the most elements that the result of an instruction has, if it is a function of small
/// constants.
fn result_size(op: &Op, sizes: &HashMap<Value, u64>) -> Option<u64> {
    let size = |value: &Value| sizes.get(value).copied();
    match op {
        Op::Unary { x, .. }
        | Op::AsType { x, .. }
        | Op::ExpandDims { x, .. }
        | Op::Transpose { x, .. }
        | Op::RotaryPeriods { inverse: x } => size(x),
        Op::Reshape { x, .. } if op.int_reads().is_empty() => size(x),
        // Broadcast, a result has at most the product of the elements.
        Op::Binary { a, b, .. } => {
            let (a, b) = (size(a)?, size(b)?);
            if a == 1 || b == 1 || a == b {
                Some(a.max(b))
            } else {
                a.checked_mul(b)
            }
        }
        Op::Concatenate { tensors, .. } => {
            tensors.iter().try_fold(0u64, |sum, tensor| sum.checked_add(size(tensor)?))
        }
        _ => None,
    }
}
