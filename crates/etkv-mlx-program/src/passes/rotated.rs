//! Fuses rotary embedding into the product of queries, keys and values.
//!
//! On a GPU, the kernel of a product of 1 to 16 rows in half precision also rotates the outputs, which saves one
//! launch per layer.

use std::collections::HashMap;

use super::only_readers;
use crate::ir::{Graph, Heads, Instruction, Int, Norm, Op, Out, Value};

/// The axis of heads in `[1, heads, T, head_dim]`.
const HEADS: i32 = 1;

/// Rewrites the products of the main chain whose heads [`heads`](super::heads) has joined.
pub fn join(graph: &mut Graph) {
    let readers = only_readers(graph);
    let found: Vec<RotatedMatch> = (0..graph.main.instructions.len())
        .filter_map(|index| Finder { graph, readers: &readers }.around(index))
        .collect();
    let mut instructions: Vec<Option<Instruction>> =
        std::mem::take(&mut graph.main.instructions).into_iter().map(Some).collect();
    let mut renamed = HashMap::new();
    for RotatedMatch { op, replaced, pieces } in found {
        let n = pieces.len() as u32;
        let out = Out::Tensors(graph.new_values(n), n);
        renamed.extend(pieces.into_iter().zip(out.tensors()));
        for &place in &replaced {
            instructions[place] = None;
        }
        // The product gets the index of the last replaced instruction: all its operands exist there.
        if let Some(&last) = replaced.iter().max() {
            instructions[last] = Some(Instruction { op, out });
        }
    }
    graph.main.instructions = instructions.into_iter().flatten().collect();
    graph.rename(&renamed);
}

/// A product, the instructions that it replaces, and their final results.
struct RotatedMatch {
    op: Op,
    replaced: Vec<usize>,
    pieces: Vec<Value>,
}

struct Finder<'a> {
    graph: &'a Graph,
    readers: &'a HashMap<Value, usize>,
}

impl Finder<'_> {
    /// Returns the only instruction that reads a value.
    fn reader(&self, value: Value) -> Option<(usize, &Op, Out)> {
        let &index = self.readers.get(&value)?;
        let instruction = &self.graph.main.instructions[index];
        Some((index, &instruction.op, instruction.out))
    }

    /// Returns the split of a value along the axis of heads: its index, its boundaries, its number of heads, and its
    /// pieces.
    fn cut(&self, value: Value) -> Option<(usize, &[i32], i32, Vec<Value>)> {
        match self.reader(value)? {
            (index, Op::Split { axis: HEADS, at, sizes, .. }, out)
                if sizes.start() == sizes.end() =>
            {
                Some((index, at, *sizes.end(), out.tensors().collect()))
            }
            _ => None,
        }
    }

    fn around(&self, index: usize) -> Option<RotatedMatch> {
        let made = &self.graph.main.instructions[index];
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
        let (view, op, Out::Tensor(all)) = self.reader(product)? else { return None };
        let Op::ReshapeTranspose { shape, perm, .. } = op else { return None };
        let &[Int::Literal(1), tokens, Int::Literal(-1), Int::Literal(head_dim)] = &shape[..]
        else {
            return None;
        };
        if perm[..] != [0, 2, 1, 3] {
            return None;
        }
        let head_dim = i32::try_from(head_dim).ok()?;

        let (cut, at, n, pieces) = self.cut(all)?;
        let (&first, still) = pieces.split_first()?;
        let (rotary, op, Out::Tensor(embedded)) = self.reader(first)? else { return None };
        let &Op::Rotary { offsets, periods, dtype, .. } = op else { return None };
        let (inner, among, rotated, mut made) = self.cut(embedded)?;
        made.extend_from_slice(still);
        let replaced = vec![index, view, cut, rotary, inner];
        // No instruction before the new product may read the heads that do not rotate.
        let reads = |value: &Value| {
            self.graph.main.instructions[..inner].iter().any(|made| made.op.reads().contains(value))
        };
        if at.first() != Some(&rotated) || still.iter().any(reads) {
            return None;
        }
        let at = among.iter().chain(at).copied().collect();
        let heads = Heads { tokens, head_dim, n, at, rotated, offsets, periods, dtype };
        let op = Op::LinearHeads { x, weight, bias, transposed: false, norm, heads };
        Some(RotatedMatch { op, replaced, pieces: made })
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs::Dtype;

    use super::*;
    use crate::ir::{Chain, IntValue};

    /// Input 0 times weight 1, viewed as 4 + 2 + 2 heads of 16 elements. The first six heads rotate. Value 6 has the
    /// queries, 7 the keys, 5 the values. Angles are 9 and 10.
    fn graph() -> Graph {
        let split =
            |x, at: i32, n| Op::Split { x: Value(x), axis: HEADS, at: vec![at], sizes: n..=n };
        let tokens = Int::Value(IntValue(0));
        let view = Op::ReshapeTranspose {
            x: Value(2),
            shape: vec![Int::Literal(1), tokens, Int::Literal(-1), Int::Literal(16)],
            perm: vec![0, 2, 1, 3],
        };
        let linear = Op::Linear { x: Value(0), weight: Value(1), bias: None, transposed: false };
        let rotary = Op::Rotary {
            x: Value(4),
            offsets: Value(9),
            periods: Value(10),
            dtype: Dtype::Bfloat16,
        };
        let attend = Op::UpdateAndAttend {
            q: Value(6),
            k: Value(7),
            v: Value(5),
            position: Value(9),
            layer: 0,
            scale: 1.0,
            softcap: None,
            sinks: None,
            out_dtype: None,
            last_query: false,
        };
        let made = [
            (linear, Out::Tensor(Value(2))),
            (view, Out::Tensor(Value(3))),
            (split(3, 6, 8), Out::Tensors(Value(4), 2)),
            (rotary, Out::Tensor(Value(8))),
            (split(8, 4, 6), Out::Tensors(Value(6), 2)),
            (attend, Out::Tensor(Value(11))),
        ];
        Graph {
            main: Chain {
                instructions: made.map(|(op, out)| Instruction { op, out }).into(),
                outputs: vec![Out::Tensor(Value(11))],
            },
            n_values: 12,
            n_ints: 1,
            ..Graph::default()
        }
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
        let stays = |change: fn(&mut Graph)| {
            let mut graph = graph();
            change(&mut graph);
            let before = graph.main.instructions.clone();
            join(&mut graph);
            assert_eq!(graph.main.instructions, before);
        };
        // The product, the heads, the heads that rotate, and the rotated heads.
        for value in [2, 3, 4, 8] {
            let mut graph = graph();
            graph.main.outputs.push(Out::Tensor(Value(value)));
            let before = graph.main.instructions.clone();
            join(&mut graph);
            assert_eq!(graph.main.instructions, before);
        }
        // The values are read before the queries are rotated.
        stays(|graph| {
            let op = Op::ExpandDims { x: Value(5), axis: 0 };
            let made = Instruction { op, out: Out::Tensor(Value(11)) };
            graph.main.instructions.insert(3, made);
        });
        // Another view.
        stays(|graph| {
            if let Op::ReshapeTranspose { perm, .. } = &mut graph.main.instructions[1].op {
                perm.swap(1, 2);
            }
        });
    }
}
