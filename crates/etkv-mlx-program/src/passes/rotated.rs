//! Fuses rotary embedding into the product of queries, keys and values.
//!
//! On a GPU, the kernel of a product of 1 to 16 rows in half precision also rotates the outputs, which saves one
//! launch per layer.

use std::collections::HashMap;

use super::heads::HEADS;
use super::{replace, view_of_heads, Readers};
use crate::ir::{Graph, Heads, Instruction, Norm, Op, Out, Value};

/// Rewrites the products of the main chain whose heads [`heads`](super::heads) has joined.
pub fn join(graph: &mut Graph) {
    let readers = Readers::of(graph);
    let found: Vec<RotatedMatch> = (0..graph.main.instructions.len())
        .filter_map(|index| RotatedMatch::around(&readers, index))
        .collect();
    let (mut new, mut renamed) = (HashMap::new(), HashMap::new());
    for RotatedMatch { op, replaced, pieces } in found {
        let n = pieces.len() as u32;
        let out = Out::Tensors(graph.new_values(n), n);
        renamed.extend(pieces.into_iter().zip(out.tensors()));
        new.extend(replaced.iter().map(|&place| (place, Vec::new())));
        // The product gets the index of the last replaced instruction: all its operands exist there.
        if let Some(&last) = replaced.iter().max() {
            new.insert(last, vec![Instruction { op, out }]);
        }
    }
    replace(graph, new);
    graph.rename(&renamed);
}

/// Returns the split of a value along the axis of heads: its index, its boundaries, its number of heads, and its
/// pieces.
fn cut<'a>(readers: &Readers<'a>, value: Value) -> Option<(usize, &'a [i32], i32, Vec<Value>)> {
    match readers.reader(value)? {
        (index, Op::Split { axis: HEADS, at, sizes, .. }, out) if sizes.start() == sizes.end() => {
            Some((index, at, *sizes.end(), out.tensors().collect()))
        }
        _ => None,
    }
}

/// A product, the instructions that it replaces, and their final results.
struct RotatedMatch {
    op: Op,
    replaced: Vec<usize>,
    pieces: Vec<Value>,
}

impl RotatedMatch {
    /// Returns the product at an index, with the operations on its heads.
    fn around(readers: &Readers, index: usize) -> Option<Self> {
        let instructions = &readers.graph.main.instructions;
        let made = &instructions[index];
        let (x, weight, bias, norm): (Value, Value, Option<Value>, Option<Norm>) = match made.op {
            Op::Linear { x, weight, bias, transposed: false } => (x, weight, bias, None),
            Op::LinearBlock {
                x,
                weight,
                bias,
                transposed: false,
                norm,
                gate: None,
                residual: None,
            } => (x, weight, bias, norm),
            _ => return None,
        };
        let Out::Tensor(product) = made.out else { return None };
        let (view, op, Out::Tensor(all)) = readers.reader(product)? else { return None };
        let (tokens, head_dim) = view_of_heads(op)?;

        let (split, at, n, pieces) = cut(readers, all)?;
        let (&first, still) = pieces.split_first()?;
        let (rotary, op, Out::Tensor(embedded)) = readers.reader(first)? else { return None };
        let &Op::Rotary { offsets, periods, dtype, .. } = op else { return None };
        let (inner, among, rotated, mut made) = cut(readers, embedded)?;
        made.extend_from_slice(still);
        let replaced = vec![index, view, split, rotary, inner];
        // No instruction before the new product may read the heads that do not rotate.
        let reads = |value: &Value| {
            instructions[..inner].iter().any(|made| made.op.reads().contains(value))
        };
        if at.first() != Some(&rotated) || still.iter().any(reads) {
            return None;
        }
        let at = among.iter().chain(at).copied().collect();
        let heads = Heads { tokens, head_dim, n, at, rotated, offsets, periods, dtype };
        let op = Op::LinearHeads { x, weight, bias, transposed: false, norm, heads };
        Some(Self { op, replaced, pieces: made })
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs::Dtype;

    use super::super::fixture::{self, assert_stays, attend, linear, split, tensor, view_heads};
    use super::*;
    use crate::ir::{Int, IntValue};

    /// Input 0 times weight 1, viewed as 4 + 2 + 2 heads of 16 elements. The first six heads rotate. Value 6 has the
    /// queries, 7 the keys, 5 the values. Angles are 9 and 10.
    fn graph() -> Graph {
        let (x, offsets, periods) = (Value(4), Value(9), Value(10));
        fixture::graph([
            tensor(linear(0, 1, None), 2),
            tensor(view_heads(2, 16), 3),
            (split(3, HEADS, &[6], 8), Out::Tensors(Value(4), 2)),
            tensor(Op::Rotary { x, offsets, periods, dtype: Dtype::Bfloat16 }, 8),
            (split(8, HEADS, &[4], 6), Out::Tensors(Value(6), 2)),
            tensor(attend([6, 7, 5], 9), 11),
        ])
    }

    #[test]
    fn a_product_turns_its_heads() {
        let mut graph = graph();
        join(&mut graph);
        let [product, attend] = &graph.main.instructions[..] else {
            panic!("{:?}", graph.main.instructions);
        };
        let heads = Heads {
            tokens: Int::Value(IntValue(0)),
            head_dim: 16,
            n: 8,
            at: vec![4, 6],
            rotated: 6,
            offsets: Value(9),
            periods: Value(10),
            dtype: Dtype::Bfloat16,
        };
        let op = Op::LinearHeads {
            x: Value(0),
            weight: Value(1),
            bias: None,
            transposed: false,
            norm: None,
            heads,
        };
        assert_eq!(product.op, op);
        let pieces: Vec<Value> = product.out.tensors().collect();
        assert_eq!(attend.op.reads()[..3], pieces);
    }

    #[test]
    fn what_others_read_stays() {
        // The product, the heads, the heads that rotate, and the rotated heads.
        for value in [2, 3, 4, 8] {
            let mut graph = graph();
            graph.main.outputs.push(Out::Tensor(Value(value)));
            assert_stays(graph, join);
        }
        // The values are read before the queries are rotated.
        let mut early = graph();
        let (op, out) = tensor(fixture::expand(5, 0), 11);
        early.main.instructions.insert(3, Instruction { op, out });
        assert_stays(early, join);
        // Another view.
        let mut viewed = graph();
        if let Op::ReshapeTranspose { perm, .. } = &mut viewed.main.instructions[1].op {
            perm.swap(1, 2);
        }
        assert_stays(viewed, join);
    }
}
