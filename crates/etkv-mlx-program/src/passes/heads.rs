//! Joins the operations on the queries, keys and values of a joined product: the view of features as heads, and
//! rotary embedding.
//!
//! One view has the heads of all pieces. It is then split along the axis of heads. Queries and keys with the same
//! angles rotate in one kernel launch.

use std::collections::{HashMap, HashSet};

use super::joined::cuts;
use super::only_readers;
use crate::ir::{Graph, Instruction, Int, Op, Out, Value};

/// The axis of heads in `[1, heads, T, head_dim]`.
const HEADS: i32 = 1;

/// Rewrites the products of the main chain whose pieces are all heads.
pub fn join(graph: &mut Graph) {
    let found: Vec<Heads> = {
        let finder = Finder::new(graph);
        (0..graph.main.instructions.len()).filter_map(|index| finder.heads(index)).collect()
    };
    let mut rewritten = HeadsRewrite::default();
    for heads in found {
        rewritten.add(graph, heads);
    }
    let old = std::mem::take(&mut graph.main.instructions);
    for (place, instruction) in old.into_iter().enumerate() {
        match rewritten.new.remove(&place) {
            Some(made) => graph.main.instructions.extend(made),
            None if rewritten.gone.contains(&place) => {}
            None => graph.main.instructions.push(instruction),
        }
    }
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
    /// The embeddings of the first pieces, if at least two have the same angles; otherwise empty.
    rotary: Vec<usize>,
}

struct Finder<'a> {
    graph: &'a Graph,
    /// The only instruction that reads each value. Outputs, and values with several readers, are absent.
    readers: HashMap<Value, usize>,
}

impl<'a> Finder<'a> {
    fn new(graph: &'a Graph) -> Self {
        let readers = only_readers(graph);
        Self { graph, readers }
    }

    /// Returns the common properties of the pieces of a split, if they are heads.
    fn heads(&self, index: usize) -> Option<Heads> {
        let instructions = &self.graph.main.instructions;
        let Instruction { op: Op::Split { x, axis: -1, at, sizes }, out } = &instructions[index]
        else {
            return None;
        };
        let views: Vec<usize> =
            out.tensors().map(|piece| self.readers.get(&piece).copied()).collect::<Option<_>>()?;
        // The heads of all pieces have the same size, and each view infers the number of heads.
        let Op::ReshapeTranspose { shape, perm, .. } = &instructions[*views.first()?].op else {
            return None;
        };
        let &[Int::Literal(1), _, Int::Literal(-1), Int::Literal(head_dim)] = &shape[..] else {
            return None;
        };
        let head_dim = i32::try_from(head_dim).ok().filter(|&size| size > 0)?;
        let same = views.iter().all(|&view| {
            matches!(&instructions[view].op,
                Op::ReshapeTranspose { shape: s, perm: p, .. } if s == shape && p == perm)
        });
        if !same || perm[..] != [0, 2, 1, 3] || sizes.start() != sizes.end() {
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
        let rotary = self.rotary(&views);
        let (shape, perm) = (shape.clone(), perm.clone());
        Some(Heads { index, x: *x, shape, perm, sizes, views, rotary })
    }

    /// Returns the embeddings of the first views that rotate by the same angles, if there are at least two.
    fn rotary(&self, views: &[usize]) -> Vec<usize> {
        let instructions = &self.graph.main.instructions;
        let embedding = |view: usize| {
            let Out::Tensor(value) = instructions[view].out else { return None };
            let reader = *self.readers.get(&value)?;
            match instructions[reader].op {
                Op::Rotary { x, offsets, periods, dtype } if x == value => {
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
}

/// The changes of the pass.
#[derive(Default)]
struct HeadsRewrite {
    /// The replacements of instructions, by index.
    new: HashMap<usize, Vec<Instruction>>,
    /// The instructions that are removed.
    gone: HashSet<usize>,
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
        self.gone.extend(views.into_iter().chain(rotary));
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
    use super::*;
    use crate::ir::{Chain, IntValue};
    use mlx_rs::Dtype;

    /// Product 0 has 4 + 2 + 2 heads of 8 elements, split into 1 to 3 and viewed as 4 to 6. Values 7 and 8 are 4 and
    /// 5 after rotation. Angles are 9 and 10.
    fn graph() -> Graph {
        let view = |x| Op::ReshapeTranspose {
            x: Value(x),
            shape: vec![
                Int::Literal(1),
                Int::Value(IntValue(0)),
                Int::Literal(-1),
                Int::Literal(8),
            ],
            perm: vec![0, 2, 1, 3],
        };
        let rotary = |x| Op::Rotary {
            x: Value(x),
            offsets: Value(9),
            periods: Value(10),
            dtype: Dtype::Float32,
        };
        let attend = Op::UpdateAndAttend {
            q: Value(7),
            k: Value(8),
            v: Value(6),
            position: Value(9),
            layer: 0,
            scale: 1.0,
            softcap: None,
            sinks: None,
            out_dtype: None,
            last_query: false,
        };
        let pieces = Op::Split { x: Value(0), axis: -1, at: vec![32, 48], sizes: 64..=64 };
        let made = [
            (pieces, Out::Tensors(Value(1), 3)),
            (view(1), Out::Tensor(Value(4))),
            (view(2), Out::Tensor(Value(5))),
            (view(3), Out::Tensor(Value(6))),
            (rotary(4), Out::Tensor(Value(7))),
            (rotary(5), Out::Tensor(Value(8))),
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

    fn kinds(graph: &Graph) -> Vec<String> {
        graph.main.instructions.iter().map(|made| made.op.kind()).collect()
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
        let stays = |change: fn(&mut Graph)| {
            let mut graph = graph();
            change(&mut graph);
            let before = graph.main.instructions.clone();
            join(&mut graph);
            assert_eq!(graph.main.instructions, before);
        };
        // A piece with another reader.
        stays(|graph| graph.main.outputs.push(Out::Tensor(Value(3))));
        // Heads of another size.
        stays(|graph| {
            if let Op::ReshapeTranspose { shape, .. } = &mut graph.main.instructions[3].op {
                shape[3] = Int::Literal(16);
            }
        });
        // Part of a head.
        stays(|graph| {
            if let Op::Split { at, .. } = &mut graph.main.instructions[0].op {
                at[0] = 28;
            }
        });
    }
}
