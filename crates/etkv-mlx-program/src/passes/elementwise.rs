//! Fuses element-wise operations into [expressions](Expression), for programs that the interpreter runs on a GPU.
//! There each launch costs the host microseconds, more time than the work takes on the device.

use std::collections::HashMap;
use std::sync::Arc;

use mlx_rs::Dtype;
use smallvec::SmallVec;

use super::{makers, only_readers};
use crate::dtype::is_float;
use crate::ir::{Binary, Expression, Graph, Instruction, Node, Op, Out, Value};
use crate::ops::cuda_text::{supports_binary, supports_unary};

/// The maximum number of tensors that an expression reads, and its maximum depth.
const MAX_INPUTS: usize = 8;
const MAX_DEPTH: usize = 10;
/// The number of nodes from which on an expression gets no further operations.
const MAX_NODES: usize = 64;

/// Replaces element-wise operations of the main chain by expressions. An operand is fused too if nothing else
/// reads it. `dtypes` has the dtypes that are certain. Operations on integers stay.
pub fn fuse(graph: &mut Graph, dtypes: &HashMap<Value, Dtype>) {
    let (readers, makers) = (only_readers(graph), makers(graph));
    let mut instructions: Vec<Option<Instruction>> =
        std::mem::take(&mut graph.main.instructions).into_iter().map(Some).collect();
    for index in (0..instructions.len()).rev() {
        let Some(Instruction { op, out: out @ Out::Tensor(_) }) = &instructions[index] else {
            continue;
        };
        if operands(op, dtypes).is_none() {
            continue;
        }
        let mut tree = Tree {
            instructions: &instructions,
            dtypes,
            readers: &readers,
            makers: &makers,
            nodes: Vec::new(),
            inputs: Vec::new(),
            fused: Vec::new(),
        };
        if tree.add_operation(index, 1).is_none() || tree.fused.len() < 2 {
            continue;
        }
        let expression = Arc::new(Expression { nodes: tree.nodes });
        let fused = Instruction {
            op: Op::Elementwise { expression, inputs: tree.inputs.into() },
            out: *out,
        };
        tree.fused.into_iter().for_each(|index| instructions[index] = None);
        instructions[index] = Some(fused);
    }
    graph.main.instructions = instructions.into_iter().flatten().collect();
}

/// Returns the tensors that an element-wise operation reads, or a concatenation of two; `None` for other operations.
fn operands(op: &Op, dtypes: &HashMap<Value, Dtype>) -> Option<SmallVec<[Value; 2]>> {
    let values: SmallVec<[Value; 2]> = match *op {
        Op::AsType { dtype, .. } if !is_float(dtype) => return None,
        Op::Unary { function, .. } if !supports_unary(function) => return None,
        Op::Binary { function, .. } if !supports_binary(function) => return None,
        Op::Unary { x, .. } | Op::AsType { x, .. } | Op::Activation { x, by: None, .. } => {
            SmallVec::from_slice(&[x])
        }
        Op::Binary { a, b, .. } | Op::Activation { x: a, by: Some(b), .. } => {
            SmallVec::from_slice(&[a, b])
        }
        // Rotary embeddings concatenate heads along the last axis, axis 3.
        Op::Concatenate { ref tensors, axis: -1 | 3 } if tensors.len() == 2 => {
            SmallVec::from_slice(tensors)
        }
        _ => return None,
    };
    let floats = values.iter().all(|value| dtypes.get(value).is_none_or(|&dtype| is_float(dtype)));
    floats.then_some(values)
}

/// An expression that grows from its result towards its inputs.
struct Tree<'a> {
    instructions: &'a [Option<Instruction>],
    dtypes: &'a HashMap<Value, Dtype>,
    readers: &'a HashMap<Value, usize>,
    makers: &'a HashMap<Value, usize>,
    nodes: Vec<Node>,
    inputs: Vec<Value>,
    /// The instructions that are part of the expression.
    fused: Vec<usize>,
}

impl Tree<'_> {
    /// Adds the instruction at `index`, at this depth, and returns its node. `None` if the expression would read too
    /// many tensors.
    fn add_operation(&mut self, index: usize, depth: usize) -> Option<usize> {
        let op = &self.instructions[index].as_ref()?.op;
        self.fused.push(index);
        let nodes = operands(op, self.dtypes)?
            .into_iter()
            .map(|value| self.add_operand(value, depth))
            .collect::<Option<SmallVec<[usize; 2]>>>()?;
        Some(match (op, &nodes[..]) {
            (Op::Unary { function, .. } | Op::Activation { function, .. }, &[x]) => {
                self.add(Node::Unary(*function, x))
            }
            (Op::AsType { dtype, .. }, &[x]) => self.add(Node::AsType(x, *dtype)),
            (Op::Binary { function, .. }, &[a, b]) => self.add(Node::Binary(*function, a, b)),
            (Op::Concatenate { axis, .. }, &[a, b]) => self.add(Node::Concatenate([a, b], *axis)),
            (Op::Activation { function, .. }, &[x, by]) => {
                let activated = self.add(Node::Unary(*function, x));
                self.add(Node::Binary(Binary::Multiply, activated, by))
            }
            _ => return None,
        })
    }

    /// Adds a node for an operand: the operation that computes the value if nothing else reads it, otherwise an
    /// input.
    fn add_operand(&mut self, value: Value, depth: usize) -> Option<usize> {
        let made = self.makers.get(&value).filter(|_| self.readers.contains_key(&value));
        let is_small = depth < MAX_DEPTH && self.nodes.len() < MAX_NODES;
        if let Some(&index) = made.filter(|_| is_small) {
            let before = (self.nodes.len(), self.inputs.len(), self.fused.len());
            if let Some(node) = self.add_operation(index, depth + 1) {
                return Some(node);
            }
            self.nodes.truncate(before.0);
            self.inputs.truncate(before.1);
            self.fused.truncate(before.2);
        }
        let input = match self.inputs.iter().position(|&known| known == value) {
            Some(input) => input,
            None if self.inputs.len() >= MAX_INPUTS => return None,
            None => {
                self.inputs.push(value);
                self.inputs.len() - 1
            }
        };
        Some(self.add(Node::Input(input)))
    }

    fn add(&mut self, node: Node) -> usize {
        self.nodes.push(node);
        self.nodes.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{self, as_type, binary, concatenate, multiply, tensor, unary};
    use super::*;
    use crate::ir::Unary;

    fn fused(ops: Vec<(Op, u32)>, outputs: &[u32]) -> Vec<Instruction> {
        let mut graph = fixture::graph(ops.into_iter().map(|(op, out)| tensor(op, out)));
        graph.main.outputs = fixture::tensors(outputs);
        let dtypes = HashMap::from([(Value(90), Dtype::Int32)]);
        fuse(&mut graph, &dtypes);
        graph.main.instructions
    }

    #[test]
    fn a_gate_is_one_expression() {
        // bfloat16(float32(x) * silu(float32(gate)))
        let made = fused(
            vec![
                (as_type(1, Dtype::Float32), 10),
                (as_type(2, Dtype::Float32), 11),
                (unary(Unary::Silu, 11), 12),
                (multiply(10, 12), 13),
                (as_type(13, Dtype::Bfloat16), 14),
            ],
            &[14],
        );
        let nodes = vec![
            Node::Input(0),
            Node::AsType(0, Dtype::Float32),
            Node::Input(1),
            Node::AsType(2, Dtype::Float32),
            Node::Unary(Unary::Silu, 3),
            Node::Binary(Binary::Multiply, 1, 4),
            Node::AsType(5, Dtype::Bfloat16),
        ];
        let expression = Arc::new(Expression { nodes });
        let inputs = vec![Value(1), Value(2)].into();
        let op = Op::Elementwise { expression, inputs };
        assert_eq!(made, [Instruction { op, out: Out::Tensor(Value(14)) }]);
    }

    #[test]
    fn a_rotation_of_heads_is_one_expression() {
        let made = fused(
            vec![
                (multiply(1, 2), 10),
                (unary(Unary::Neg, 4), 11),
                (concatenate(&[11, 3], -1), 12),
                (multiply(12, 5), 13),
                (binary(Binary::Add, 10, 13), 14),
                (concatenate(&[14, 6], 3), 15),
            ],
            &[15],
        );
        let [Instruction { op: Op::Elementwise { expression, inputs }, .. }] = &made[..] else {
            panic!("{made:?}");
        };
        assert_eq!(inputs[..], [1, 2, 4, 3, 5, 6].map(Value));
        assert_eq!(expression.nodes.last(), Some(&Node::Concatenate([9, 10], 3)));
        // Along another axis, and of three tensors.
        let other = vec![(unary(Unary::Neg, 1), 10), (concatenate(&[10, 2], 1), 11)];
        assert_eq!(fused(other, &[11]).len(), 2);
        let three = vec![(unary(Unary::Neg, 1), 10), (concatenate(&[10, 2, 3], -1), 11)];
        assert_eq!(fused(three, &[11]).len(), 2);
    }

    #[test]
    fn operations_of_integers_stay() {
        let ints = vec![(binary(Binary::Add, 90, 1), 10), (unary(Unary::Neg, 10), 11)];
        assert_eq!(fused(ints, &[11]).len(), 2);
        let cast = vec![(as_type(1, Dtype::Int32), 10), (as_type(10, Dtype::Float32), 11)];
        assert_eq!(fused(cast, &[11]).len(), 2);
    }

    #[test]
    fn results_with_other_readers_stay() {
        let two_readers = vec![
            (unary(Unary::Exp, 1), 10),
            (unary(Unary::Neg, 10), 11),
            (binary(Binary::Add, 10, 11), 12),
        ];
        let made = fused(two_readers, &[12]);
        assert_eq!(made.len(), 2);
        assert_eq!(made[0].op, unary(Unary::Exp, 1));
        let Op::Elementwise { expression, inputs } = &made[1].op else { panic!("{made:?}") };
        assert_eq!(&inputs[..], [Value(10)]);
        let (x, negative) = (Node::Input(0), Node::Unary(Unary::Neg, 1));
        assert_eq!(expression.nodes, [x, x, negative, Node::Binary(Binary::Add, 0, 2)]);
        // A value that is an output of the program, and a single operation.
        let outputs = vec![(unary(Unary::Exp, 1), 10), (unary(Unary::Neg, 10), 11)];
        assert_eq!(fused(outputs, &[10, 11]).len(), 2);
    }

    #[test]
    fn long_chains_are_several_expressions() {
        let chain = (10..60).map(|at| (unary(Unary::Sin, at - 1), at)).collect();
        let made = fused(chain, &[59]);
        let sizes: Vec<usize> = made
            .iter()
            .map(|made| match &made.op {
                Op::Elementwise { expression, .. } => expression.nodes.len() - 1,
                _ => 1,
            })
            .collect();
        assert_eq!(sizes, [MAX_DEPTH; 5]);
    }
}
