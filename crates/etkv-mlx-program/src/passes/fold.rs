//! Computes values at load if they are the same in every step.
//!
//! Such values depend only on constants: the periods of rotary embeddings, a norm's weight plus one, conversions of
//! scalars.

use std::collections::{HashMap, HashSet};

use crate::ir::{Constant, Graph, Op, Out, Value};

/// The maximum elements of a result. Results need memory in addition to their constants, and weights must not be in
/// memory twice.
const MAX_ELEMENTS: u64 = 1 << 18;

/// Moves instructions whose operands are small constants to the init chain.
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

/// Returns the maximum elements of an instruction's result, if it is a function of small constants.
fn result_size(op: &Op, sizes: &HashMap<Value, u64>) -> Option<u64> {
    let size = |value: &Value| sizes.get(value).copied();
    match op {
        Op::Unary { x, .. }
        | Op::AsType { x, .. }
        | Op::ExpandDims { x, .. }
        | Op::Transpose { x, .. }
        | Op::RotaryPeriods { inverse: x } => size(x),
        Op::Reshape { x, .. } if op.int_reads().is_empty() => size(x),
        // With broadcasting, a result has at most the product of both numbers of elements.
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

#[cfg(test)]
mod tests {
    use super::super::fixture::{
        self, add, constant, input, numbered, ops, tensor, tensors, unary,
    };
    use super::*;
    use crate::ir::{Chain, Dim, InputSpec, Unary};
    use mlx_rs::Dtype;

    /// Constant 0 is a norm's weight, 1 a number, and 2 a large tensor. The input is 3.
    fn folded(ops: Vec<Op>, init: Chain, init_targets: Vec<Value>) -> Graph {
        let shapes = [&[64][..], &[], &[1 << 10, 1 << 10]];
        let mut graph = Graph {
            constants: shapes.map(|shape| constant("", shape)).to_vec(),
            inputs: vec![input(3, &[Dim::UpTo(None)], 6)],
            init,
            init_targets,
            ..fixture::graph(numbered(4, ops))
        };
        fold(&mut graph);
        graph
    }

    fn wide(x: u32) -> Op {
        fixture::as_type(x, Dtype::Float32)
    }

    fn norm(x: u32, weight: u32) -> Op {
        fixture::rms_norm(x, Some(weight), 1e-6)
    }

    #[test]
    fn what_constants_lead_to_is_made_at_load() {
        let graph = folded(vec![wide(0), add(4, 1), norm(3, 5)], Chain::default(), Vec::new());
        // There are two more constants, so the input is 5, and results are the values 6 and up.
        assert_eq!(ops(&graph), [norm(5, 4)]);
        assert_eq!(graph.main.outputs, tensors(&[8]));
        assert_eq!(graph.constants.len(), 5);
        assert!(matches!(graph.inputs[0], InputSpec::Tensor { value: Value(5), .. }));
        let init: Vec<Op> = graph.init.instructions.iter().map(|made| made.op.clone()).collect();
        assert_eq!(init, [wide(0), add(6, 1)]);
        assert_eq!(graph.init_targets, [Value(3), Value(4)]);
        assert_eq!(graph.init.outputs, tensors(&[6, 7]));
        assert_eq!(graph.n_values, 9);
    }

    #[test]
    fn what_is_large_or_no_constant_stays() {
        for op in [wide(2), wide(3), add(0, 2)] {
            let graph = folded(vec![op.clone(), norm(3, 4)], Chain::default(), Vec::new());
            assert_eq!(graph.main.instructions[0].op, op);
            assert_eq!(graph.constants.len(), 3);
        }
        // An output is not moved.
        assert_eq!(folded(vec![wide(0)], Chain::default(), Vec::new()).constants.len(), 3);
        // The init chain replaces the constant.
        let init = fixture::graph([tensor(unary(Unary::Neg, 1), 9)]).main;
        let graph = folded(vec![wide(0), norm(3, 4)], init, vec![Value(0)]);
        assert_eq!(graph.main.instructions.len(), 2);
    }
}
