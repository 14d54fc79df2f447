//! Joins the operations on the queries, keys and values of a joined product: the view of features as heads, and
//! rotary embedding.
//!
//! One view has the heads of all pieces. It is then split along the axis of heads. Queries and keys with the same
//! angles rotate in one kernel launch.

use std::collections::HashMap;

use super::joined::cuts;
use super::{replace, view_of_heads, Readers};
use crate::ir::{Graph, Instruction, Int, Op, Out, Value};

/// The axis of heads in `[1, heads, T, head_dim]`.
pub const HEADS: i32 = 1;

/// Rewrites the products of the main chain whose pieces are all heads.
pub fn join(graph: &mut Graph) {
    let found: Vec<Heads> = {
        let readers = Readers::of(graph);
        (0..graph.main.instructions.len()).filter_map(|index| Heads::of(&readers, index)).collect()
    };
    let mut rewritten = HeadsRewrite::default();
    for heads in found {
        rewritten.add(graph, heads);
    }
    replace(graph, rewritten.new);
    graph.rename(&rewritten.renamed);
}

/// The common properties of the pieces of a split.
struct Heads {
    /// The split.
    index: usize,
    x: Value,
    shape: Vec<Int>,
    perm: Vec<i32>,
    /// The number of heads of each piece.
    sizes: Vec<i32>,
    /// The views of the pieces.
    views: Vec<usize>,
    /// The rotary embeddings of the first pieces, if at least two have the same angles; otherwise empty.
    rotary: Vec<usize>,
}

impl Heads {
    /// Returns the common properties of the pieces of a split, if they are heads.
    fn of(readers: &Readers, index: usize) -> Option<Self> {
        let instructions = &readers.graph.main.instructions;
        let Instruction { op: Op::Split { x, axis: -1, at, sizes }, out } = &instructions[index]
        else {
            return None;
        };
        let views = out.tensors().map(|piece| Some(readers.reader(piece)?.0));
        let views: Vec<usize> = views.collect::<Option<_>>()?;
        // The heads of all pieces have the same size, and each view infers the number of heads.
        let first = &instructions[*views.first()?].op;
        let (_, head_dim) = view_of_heads(first)?;
        let Op::ReshapeTranspose { shape, perm, .. } = first else { return None };
        let same = views.iter().all(|&view| {
            matches!(&instructions[view].op,
                Op::ReshapeTranspose { shape: s, perm: p, .. } if s == shape && p == perm)
        });
        if !same || sizes.start() != sizes.end() {
            return None;
        }
        let starts = [0].iter().chain(at.iter());
        let stops = at.iter().chain([sizes.end()]);
        let sizes = starts
            .zip(stops)
            .map(|(start, stop)| {
                let size = stop - start;
                (size % head_dim == 0).then_some(size / head_dim)
            })
            .collect::<Option<Vec<_>>>()?;
        let rotary = rotated_together(readers, &views);
        let (shape, perm) = (shape.clone(), perm.clone());
        Some(Self { index, x: *x, shape, perm, sizes, views, rotary })
    }
}

/// Returns the rotary embeddings of the first views that rotate by the same angles, if there are at least
/// two.
fn rotated_together(readers: &Readers, views: &[usize]) -> Vec<usize> {
    let embedding = |view: usize| {
        let Out::Tensor(value) = readers.graph.main.instructions[view].out else { return None };
        match readers.reader(value)? {
            (reader, &Op::Rotary { x, offsets, periods, dtype }, _) if x == value => {
                Some((reader, (offsets, periods, dtype)))
            }
            _ => None,
        }
    };
    let Some((_, angles)) = views.first().and_then(|&view| embedding(view)) else {
        return Vec::new();
    };
    let shared: Vec<usize> = views
        .iter()
        .map_while(|&view| embedding(view).filter(|(_, found)| *found == angles))
        .map(|(reader, _)| reader)
        .collect();
    if shared.len() > 1 {
        shared
    } else {
        Vec::new()
    }
}

/// The changes of the pass.
#[derive(Default)]
struct HeadsRewrite {
    /// The replacements of instructions, by index.
    new: HashMap<usize, Vec<Instruction>>,
    renamed: HashMap<Value, Value>,
}

impl HeadsRewrite {
    fn add(&mut self, graph: &mut Graph, heads: Heads) {
        let Heads { index, x, shape, perm, sizes, views, rotary } = heads;
        let results = |graph: &Graph, places: &[usize]| -> Vec<Value> {
            places.iter().flat_map(|&place| graph.main.instructions[place].out.tensors()).collect()
        };
        let all = graph.new_value();
        let op = Op::ReshapeTranspose { x, shape, perm };
        let mut first = vec![Instruction { op, out: Out::Tensor(all) }];

        // In the first split, the pieces that rotate together are one piece.
        self.new.extend(views.iter().chain(&rotary).map(|&place| (place, Vec::new())));
        let n_rotated = rotary.len();
        let mut outer = sizes[n_rotated..].to_vec();
        if n_rotated > 0 {
            outer.insert(0, sizes[..n_rotated].iter().sum());
        }
        let mut values = vec![all];
        if outer.len() > 1 {
            let op = split(all, &outer);
            let out = pieces(graph, outer.len());
            first.push(Instruction { op, out });
            values = out.tensors().collect();
        }
        let rest = &values[usize::from(n_rotated > 0)..];
        self.renamed
            .extend(results(graph, &views[n_rotated..]).into_iter().zip(rest.iter().copied()));

        if let (Some(&at), Some(&together)) = (rotary.iter().min(), values.first()) {
            let mut op = graph.main.instructions[at].op.clone();
            if let Op::Rotary { x, .. } = &mut op {
                *x = together;
            }
            let embedded = graph.new_value();
            let out = pieces(graph, n_rotated);
            self.renamed.extend(results(graph, &rotary).into_iter().zip(out.tensors()));
            let made = [
                Instruction { op, out: Out::Tensor(embedded) },
                Instruction { op: split(embedded, &sizes[..n_rotated]), out },
            ];
            self.new.insert(at, made.into());
        }
        self.new.insert(index, first);
    }
}

fn pieces(graph: &mut Graph, n: usize) -> Out {
    let n = n as u32;
    Out::Tensors(graph.new_values(n), n)
}

fn split(x: Value, sizes: &[i32]) -> Op {
    let (at, total) = cuts(sizes.iter().copied());
    Op::Split { x, axis: HEADS, at, sizes: total..=total }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{self, assert_stays, attend, kinds, tensor, view_heads};
    use super::*;
    use mlx_rs::Dtype;

    /// Product 0 has 4 + 2 + 2 heads of 8 elements, split into 1 to 3 and viewed as 4 to 6. Values 7 and 8 are 4 and
    /// 5 after rotation. Angles are 9 and 10.
    fn graph() -> Graph {
        let rotary = |x| {
            let (x, offsets, periods) = (Value(x), Value(9), Value(10));
            Op::Rotary { x, offsets, periods, dtype: Dtype::Float32 }
        };
        fixture::graph([
            (fixture::split(0, -1, &[32, 48], 64), Out::Tensors(Value(1), 3)),
            tensor(view_heads(1, 8), 4),
            tensor(view_heads(2, 8), 5),
            tensor(view_heads(3, 8), 6),
            tensor(rotary(4), 7),
            tensor(rotary(5), 8),
            tensor(attend([7, 8, 6], 9), 11),
        ])
    }

    #[test]
    fn heads_are_viewed_and_rotated_together() {
        let mut graph = graph();
        join(&mut graph);
        assert_eq!(
            kinds(&graph),
            ["ReshapeTranspose", "Split", "Rotary", "Split", "UpdateAndAttend"]
        );
        let ops: Vec<&Op> = graph.main.instructions.iter().map(|made| &made.op).collect();
        assert!(matches!(ops[1], Op::Split { axis: 1, at, .. } if at[..] == [6]));
        assert!(matches!(ops[3], Op::Split { axis: 1, at, .. } if at[..] == [4]));
        let made: Vec<Vec<Value>> =
            graph.main.instructions.iter().map(|made| made.out.tensors().collect()).collect();
        assert_eq!(ops[1].reads(), made[0]);
        assert_eq!(ops[2].reads()[0], made[1][0]);
        assert_eq!(ops[3].reads(), made[2]);
        assert_eq!(ops[4].reads()[..3], [made[3][0], made[3][1], made[1][1]]);
    }

    #[test]
    fn other_angles_turn_alone() {
        let mut graph = graph();
        if let Op::Rotary { periods, .. } = &mut graph.main.instructions[5].op {
            *periods = Value(9);
        }
        join(&mut graph);
        assert_eq!(
            kinds(&graph),
            ["ReshapeTranspose", "Split", "Rotary", "Rotary", "UpdateAndAttend"]
        );
    }

    #[test]
    fn what_is_no_head_stays() {
        // A piece with another reader.
        let mut read = graph();
        read.main.outputs.push(Out::Tensor(Value(3)));
        assert_stays(read, join);
        // Heads of another size, and part of a head.
        for (index, op) in [(3, view_heads(3, 16)), (0, fixture::split(0, -1, &[28, 48], 64))] {
            let mut other = graph();
            other.main.instructions[index].op = op;
            assert_stays(other, join);
        }
    }
}
