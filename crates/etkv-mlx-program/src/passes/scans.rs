//! Fuses recurrences with the operations that compute their operands, for programs that the interpreter runs on CUDA:
//! the views, norms and decays before a recurrence cost more launches than the recurrence itself.

use std::collections::HashMap;
use std::sync::Arc;

use etkv::kernels::recurrent::HeadNorm;
use etkv::kernels::Function;
use etkv_core::RecurrentLayer;
use mlx_rs::{Array, Dtype};
use smallvec::SmallVec;

use super::{dead, maker, makers, only_readers};
use crate::dtype::is_float;
use crate::ir::{
    Expression, Graph, Int, Node, Norm, Op, RecurrentCall, RecurrentFunction, ScanNumbers,
    ScanRows, Value,
};
use crate::ops::cuda_text::{supports_binary, supports_unary};

/// Fuses the recurrences of the main chain that have one decay per head. `constants` are the loaded
/// constants, and `dtypes` has the dtypes that are certain.
pub fn fuse(graph: &mut Graph, constants: &[Option<Array>], dtypes: &HashMap<Value, Dtype>) {
    let finder = Finder {
        graph,
        constants,
        dtypes,
        makers: makers(graph),
        readers: only_readers(graph),
        pieces: pieces(graph),
    };
    let instructions = graph.main.instructions.iter().enumerate();
    let fused: Vec<(usize, RecurrentCall)> =
        instructions.filter_map(|(index, made)| Some((index, finder.scan(&made.op)?))).collect();
    for (index, call) in fused {
        graph.main.instructions[index].op = Op::UpdateRecurrent(Box::new(call));
    }
    dead::eliminate(graph);
}

/// Some columns of a tensor.
#[derive(Clone, Copy)]
struct Piece {
    x: Value,
    start: i32,
    stop: i32,
}

/// Returns the pieces of tensors along their last axis, if their columns are certain.
fn pieces(graph: &Graph) -> HashMap<Value, Piece> {
    let mut pieces = HashMap::new();
    for made in &graph.main.instructions {
        let Op::Split { x, axis: -1, at, sizes } = &made.op else {
            continue;
        };
        let stops = at.iter().copied().chain((sizes.start() == sizes.end()).then(|| *sizes.end()));
        let starts = std::iter::once(0).chain(at.iter().copied());
        let columns = starts.zip(stops).map(|(start, stop)| Piece { x: *x, start, stop });
        pieces.extend(made.out.tensors().zip(columns));
    }
    pieces
}

struct Finder<'a> {
    graph: &'a Graph,
    constants: &'a [Option<Array>],
    dtypes: &'a HashMap<Value, Dtype>,
    makers: HashMap<Value, usize>,
    readers: HashMap<Value, usize>,
    pieces: HashMap<Value, Piece>,
}

impl Finder<'_> {
    /// Returns a recurrence fused with operations before it, if there are any.
    fn scan(&self, op: &Op) -> Option<RecurrentCall> {
        let Op::UpdateRecurrent(call) = op else {
            return None;
        };
        let RecurrentFunction::Scan { scale } = call.function else {
            return None;
        };
        let RecurrentLayer::Recurrence { k_heads, heads, k_dim, v_dim, channel_decay: false } =
            call.config
        else {
            return None;
        };
        let (&[q, k, v, ref gates @ ..], Some(_)) = (&call.tensors[..], call.out_dtype) else {
            return None;
        };
        let of = |value, heads, dim| match self.columns(value, [heads, dim]) {
            Some((x, rows)) => (x, rows),
            None => (value, ScanRows::Tensor),
        };
        // The kernel does not normalize values.
        let values = match of(v, heads, v_dim) {
            (_, ScanRows::Columns { norm: Some(_), .. }) => (v, ScanRows::Tensor),
            values => values,
        };
        let operands = [of(q, k_heads, k_dim), of(k, k_heads, k_dim), values];
        let mut tensors: SmallVec<[Value; 5]> = operands.iter().map(|(x, _)| *x).collect();
        let mut numbers = Vec::new();
        for &value in gates {
            match self.function(value) {
                Some((expression, inputs)) => {
                    numbers.push(ScanNumbers::Function { expression, n_inputs: inputs.len() });
                    tensors.extend(inputs);
                }
                None => {
                    numbers.push(ScanNumbers::Tensor);
                    tensors.push(value);
                }
            }
        }
        let rows = operands.map(|(_, rows)| rows);
        let is_plain = rows.iter().all(|rows| *rows == ScanRows::Tensor)
            && numbers.iter().all(|numbers| *numbers == ScanNumbers::Tensor);
        let function = RecurrentFunction::FusedScan { scale, rows, numbers };
        (!is_plain).then(|| RecurrentCall { function, tensors, ..(**call).clone() })
    }

    /// Returns the tensor `[1, T, columns]` whose columns are the vectors of `value`, `[1, heads, T, dim]`.
    fn columns(&self, value: Value, sizes: [i32; 2]) -> Option<(Value, ScanRows)> {
        let (columns, norm) = match self.maker(value)? {
            Op::ReshapeTranspose { x, shape, perm } if perm[..] == [0, 2, 1, 3] => {
                (heads_of(*x, shape, sizes)?, None)
            }
            Op::Transpose { x, perm } if perm[..] == [0, 2, 1, 3] => {
                let (x, norm) = match self.maker(*x)? {
                    &Op::NormInFloat32 {
                        x: normalized,
                        norm: Norm { weight: None, eps, .. },
                        scale,
                        dtype: Dtype::Float32,
                    } if self.readers.contains_key(x) => {
                        let factor = scale.map_or(Some(1.0), |scale| self.number(scale))?;
                        (normalized, Some(HeadNorm { eps, factor }))
                    }
                    _ => (*x, None),
                };
                match self.maker(x)? {
                    Op::Reshape { x, shape } => (heads_of(*x, shape, sizes)?, norm),
                    _ => return None,
                }
            }
            _ => return None,
        };
        let &Piece { x, start, stop } = self.pieces.get(&columns)?;
        let fits = sizes[0].checked_mul(sizes[1]) == Some(stop - start);
        fits.then_some((x, ScanRows::Columns { start, norm }))
    }

    /// Returns the function that computes `value`, `[1, heads, T]`, as `[1, T, heads]`, and the tensors that it reads.
    fn function(&self, value: Value) -> Option<(Arc<Expression>, SmallVec<[Value; 4]>)> {
        let x = match self.maker(value)? {
            Op::Transpose { x, perm } if perm[..] == [0, 2, 1] => *x,
            _ => return None,
        };
        if !self.readers.contains_key(&x) {
            return None;
        }
        let (nodes, inputs): (Vec<Node>, SmallVec<[Value; 4]>) = match self.maker(x)? {
            Op::Elementwise { expression, inputs } if inputs.len() <= Function::MAX_INPUTS => {
                return Some((expression.clone(), SmallVec::from_slice(inputs)));
            }
            &Op::Unary { function, x } if supports_unary(function) => {
                (vec![Node::Input(0), Node::Unary(function, 0)], SmallVec::from_slice(&[x]))
            }
            &Op::Binary { function, a, b } if supports_binary(function) => {
                let nodes = vec![Node::Input(0), Node::Input(1), Node::Binary(function, 0, 1)];
                (nodes, SmallVec::from_slice(&[a, b]))
            }
            _ => return None,
        };
        let floats =
            inputs.iter().all(|input| self.dtypes.get(input).copied().is_some_and(is_float));
        floats.then(|| (Arc::new(Expression { nodes }), inputs))
    }

    fn maker(&self, value: Value) -> Option<&Op> {
        maker(self.graph, &self.makers, value)
    }

    /// Returns the value of a float32 constant of one element.
    fn number(&self, value: Value) -> Option<f32> {
        let constant = self.constants.get(value.0 as usize)?.as_ref()?;
        let is_number = constant.size() == 1 && constant.dtype() == Dtype::Float32;
        is_number.then(|| constant.try_item_exact::<f32>().ok())?
    }
}

/// Returns `x` if a reshape to `shape` splits each token's columns into these numbers of heads and of elements.
fn heads_of(x: Value, shape: &[Int], [heads, dim]: [i32; 2]) -> Option<Value> {
    let is = |size: Int, number: i32| size == Int::Literal(i64::from(number));
    let fits = |size: Int, number: i32| is(size, number) || is(size, -1);
    match *shape {
        [one, _, n, size] if is(one, 1) && fits(n, heads) && fits(size, dim) => Some(x),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::dtypes;
    use super::super::fixture::{self, as_type, constant, tensor, unary};
    use super::*;
    use crate::ir::{Out, Unary};

    const BF16: Dtype = Dtype::Bfloat16;

    fn split(x: u32, at: &[i32], size: i32, out: u32) -> (Op, Out) {
        (fixture::split(x, -1, at, size), Out::Tensors(Value(out), at.len() as u32 + 1))
    }

    fn reshape(x: u32, heads: i64, dim: i64, out: u32) -> (Op, Out) {
        tensor(fixture::reshape(x, &[1, -1, heads, dim]), out)
    }

    fn transpose(x: u32, perm: &[i32], out: u32) -> (Op, Out) {
        tensor(fixture::transpose(x, perm), out)
    }

    fn norm(x: u32, scale: Option<u32>, out: u32) -> (Op, Out) {
        let norm = Norm { weight: None, eps: 0.5, in_float32: true };
        let (x, scale, dtype) = (Value(x), scale.map(Value), Dtype::Float32);
        tensor(Op::NormInFloat32 { x, norm, scale, dtype }, out)
    }

    /// Fuses a recurrence of 2 heads of 4 by 3 elements. Constant 0 is the number 0.25, value 1 a tensor in bfloat16.
    /// Returns the tensors and the function.
    fn fused(before: Vec<(Op, Out)>, tensors: [u32; 5]) -> (Vec<u32>, RecurrentFunction) {
        let call = RecurrentCall {
            layer: 0,
            config: RecurrentLayer::Recurrence {
                k_heads: 2,
                heads: 2,
                k_dim: 4,
                v_dim: 3,
                channel_decay: false,
            },
            function: RecurrentFunction::Scan { scale: 1.0 },
            tensors: tensors.into_iter().map(Value).collect(),
            position: Value(2),
            out_dtype: Some(BF16),
        };
        let first = tensor(as_type(50, BF16), 1);
        let scan = tensor(Op::UpdateRecurrent(Box::new(call)), 49);
        let all = std::iter::once(first).chain(before).chain([scan]);
        let mut graph = Graph { constants: vec![constant("", &[])], ..fixture::graph(all) };
        let constants = [Some(Array::from_f32(0.25))];
        let dtypes = dtypes::with_constants(&graph, &constants);
        fuse(&mut graph, &constants, &dtypes);
        match graph.main.instructions.pop().map(|made| made.op) {
            Some(Op::UpdateRecurrent(call)) => {
                (call.tensors.iter().map(|value| value.0).collect(), call.function)
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn views_norms_and_functions_are_part_of_the_scan() {
        let heads = [0, 2, 1, 3];
        let before = vec![
            split(10, &[8, 16], 22, 11),
            reshape(11, 2, 4, 20),
            norm(20, Some(0), 21),
            transpose(21, &heads, 22),
            reshape(12, 2, 4, 23),
            transpose(23, &heads, 24),
            reshape(13, -1, 3, 25),
            transpose(25, &heads, 26),
            tensor(unary(Unary::Sigmoid, 1), 27),
            transpose(27, &[0, 2, 1], 28),
        ];
        let (tensors, function) = fused(before, [22, 24, 26, 30, 28]);
        assert_eq!(tensors, [10, 10, 10, 30, 1]);
        let columns = |start, norm| ScanRows::Columns { start, norm };
        let rows = [
            columns(0, Some(HeadNorm { eps: 0.5, factor: 0.25 })),
            columns(8, None),
            columns(16, None),
        ];
        let nodes = vec![Node::Input(0), Node::Unary(Unary::Sigmoid, 0)];
        let expression = Arc::new(Expression { nodes });
        let numbers = vec![ScanNumbers::Tensor, ScanNumbers::Function { expression, n_inputs: 1 }];
        assert_eq!(function, RecurrentFunction::FusedScan { scale: 1.0, rows, numbers });
    }

    #[test]
    fn values_are_not_normalized_by_the_kernel() {
        let before = vec![
            split(10, &[6], 20, 11),
            reshape(11, 2, 3, 20),
            norm(20, None, 21),
            transpose(21, &[0, 2, 1, 3], 22),
        ];
        let found = fused(before, [31, 32, 22, 33, 34]);
        assert_eq!(found, (vec![31, 32, 22, 33, 34], RecurrentFunction::Scan { scale: 1.0 }));
    }

    #[test]
    fn other_operands_stay() {
        let heads = [0, 2, 1, 3];
        let plain = RecurrentFunction::Scan { scale: 1.0 };
        for before in [
            // Pieces of other sizes, or of a tensor of unknown size.
            vec![split(10, &[9], 20, 11), reshape(11, 2, 4, 20), transpose(20, &heads, 22)],
            vec![reshape(11, 2, 4, 20), transpose(20, &heads, 22)],
            // Other heads, and another order.
            vec![split(10, &[8], 20, 11), reshape(11, 4, 2, 20), transpose(20, &heads, 22)],
            vec![split(10, &[8], 20, 11), reshape(11, 2, 4, 20), transpose(20, &[0, 1, 2, 3], 22)],
            // A factor that is not known.
            vec![
                split(10, &[8], 20, 11),
                reshape(11, 2, 4, 20),
                norm(20, Some(9), 21),
                transpose(21, &heads, 22),
            ],
            // A function of integers or of unknown dtype, and another order.
            vec![tensor(unary(Unary::Exp, 48), 20), transpose(20, &[0, 2, 1], 33)],
            vec![tensor(unary(Unary::Exp, 1), 20), transpose(20, &[0, 1, 2], 33)],
        ] {
            let found = fused(before.clone(), [22, 31, 32, 33, 34]);
            assert_eq!(found, (vec![22, 31, 32, 33, 34], plain.clone()), "{before:?}");
        }
    }
}
