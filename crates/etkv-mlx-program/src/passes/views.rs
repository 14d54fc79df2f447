//! Merges chains of views (reshapes, transpositions and slices), and removes views that change nothing.
//!
//! A view moves no elements, but MLX creates, schedules and frees a node for each view. In a decode step with
//! one token, heads need no transposition, and one reshape replaces two views.

use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;

use super::{dead, dtypes, maker, makers};
use crate::ir::{Graph, Instruction, Int, Op, Out, Value};

/// Merges the views of the main chain. Results stay the same bit for bit.
pub fn merge(graph: &mut Graph) {
    skip_through(graph);
    pair(graph);
    split(graph);
    dead::eliminate(graph);
}

/// Makes views read the operands of the views before them, and removes views without effect.
fn skip_through(graph: &mut Graph) {
    let dtypes = dtypes::known(graph);
    let mut renamed = HashMap::<Value, Value>::new();
    // The views so far, with their operands after the changes.
    let mut views = HashMap::<Value, Op>::new();
    for Instruction { op, out } in &mut graph.main.instructions {
        op.for_each_read(&mut |value| *value = *renamed.get(value).unwrap_or(value));
        let Out::Tensor(value) = *out else { continue };
        match op {
            Op::Reshape { x, .. } => {
                // The earlier view keeps the order of elements, so this view can read the operand of the earlier one.
                if let Some(Op::Reshape { x: read, .. } | Op::ExpandDims { x: read, .. }) =
                    views.get(x)
                {
                    *x = *read;
                }
            }
            Op::Transpose { x, perm } => {
                if let Some(Op::Transpose { x: read, perm: inner }) = views.get(x) {
                    if let Some(both) = composed(inner, perm) {
                        (*x, *perm) = (*read, both);
                    }
                }
            }
            _ => {}
        }
        let same = match op {
            Op::Transpose { x, perm } => {
                (0..).zip(perm.iter()).all(|(axis, &from)| axis == from).then_some(*x)
            }
            Op::Slice {
                x, start: Int::Literal(0), stop: Int::Literal(i64::MAX), step: 1, ..
            } => Some(*x),
            Op::AsType { x, dtype } => (dtypes.get(x) == Some(dtype)).then_some(*x),
            _ => None,
        };
        if let Some(same) = same {
            renamed.insert(value, same);
        }
        if matches!(op, Op::Reshape { .. } | Op::ExpandDims { .. } | Op::Transpose { .. }) {
            views.insert(value, op.clone());
        }
    }
    graph.rename(&renamed);
    graph
        .main
        .instructions
        .retain(|made| !matches!(made.out, Out::Tensor(value) if renamed.contains_key(&value)));
}

/// Returns the transposition that is `first`, then `second`, or `None` if their numbers of axes differ.
fn composed(first: &[i32], second: &[i32]) -> Option<Vec<i32>> {
    let is_permutation = |perm: &[i32]| {
        let mut sorted = perm.to_vec();
        sorted.sort_unstable();
        (0..).zip(&sorted).all(|(axis, &found)| axis == found)
    };
    if first.len() != second.len() || !is_permutation(first) || !is_permutation(second) {
        return None;
    }
    Some(second.iter().map(|&axis| first[axis as usize]).collect())
}

/// Merges a reshape and a following transposition into one instruction, if nothing else reads the intermediate value.
fn pair(graph: &mut Graph) {
    let n_uses = graph.main.n_uses();
    let makers = makers(graph);
    let mut paired = Vec::new();
    for (index, instruction) in graph.main.instructions.iter().enumerate() {
        let alone = |value: Value| {
            (n_uses.get(&value) == Some(&1)).then(|| maker(graph, &makers, value)).flatten()
        };
        let pair = match &instruction.op {
            Op::Transpose { x, perm } => match alone(*x) {
                Some(Op::Reshape { x: read, shape }) if shape.len() == perm.len() => {
                    let (shape, perm) = (shape.clone(), perm.clone());
                    Some((*x, Op::ReshapeTranspose { x: *read, shape, perm }))
                }
                _ => None,
            },
            Op::Reshape { x, shape } => match alone(*x) {
                Some(Op::Transpose { x: read, perm }) => {
                    let (perm, shape) = (perm.clone(), shape.clone());
                    Some((*x, Op::TransposeReshape { x: *read, perm, shape }))
                }
                _ => None,
            },
            _ => None,
        };
        if let Some((between, op)) = pair {
            paired.push((index, makers[&between], op));
        }
    }
    let mut gone = vec![false; graph.main.instructions.len()];
    let mut is_pair = vec![false; gone.len()];
    for (index, before, op) in paired {
        // If the first of three views pairs with the second, the third stays.
        if !is_pair[before] {
            graph.main.instructions[index].op = op;
            (is_pair[index], gone[before]) = (true, true);
        }
    }
    remove(graph, gone);
}

/// Removes the marked instructions of the main chain.
fn remove(graph: &mut Graph, marked: Vec<bool>) {
    let mut marked = marked.into_iter();
    graph.main.instructions.retain(|_| !marked.next().unwrap_or(false));
}

/// A piece of a tensor: its start and end, and the possible sizes of the axis.
struct Piece {
    index: usize,
    value: Value,
    start: i32,
    /// `None` is the end of the axis.
    stop: Option<i32>,
    sizes: RangeInclusive<i32>,
}

/// Replaces slices that split an axis into pieces by one instruction.
fn split(graph: &mut Graph) {
    let mut found = BTreeMap::<(Value, i32), Vec<Piece>>::new();
    for (index, instruction) in graph.main.instructions.iter().enumerate() {
        let Out::Tensor(value) = instruction.out else { continue };
        if let Some((of, piece)) = piece(index, &instruction.op, value) {
            found.entry(of).or_default().push(piece);
        }
    }
    let mut renamed = HashMap::new();
    let mut gone = vec![false; graph.main.instructions.len()];
    for ((x, axis), mut pieces) in found {
        pieces.sort_by_key(|piece| piece.start);
        let Some(at) = cuts(&pieces) else { continue };
        let first = pieces.iter().map(|piece| piece.index).min().unwrap_or_default();
        let values = Out::Tensors(graph.new_values(pieces.len() as u32), pieces.len() as u32);
        for (piece, value) in pieces.iter().zip(values.tensors()) {
            renamed.insert(piece.value, value);
            gone[piece.index] = piece.index != first;
        }
        let sizes = pieces[0].sizes.clone();
        graph.main.instructions[first] =
            Instruction { op: Op::Split { x, axis, at, sizes }, out: values };
    }
    remove(graph, gone);
    graph.rename(&renamed);
}

/// Returns the operand and the axis of a slice with fixed bounds, and its piece.
fn piece(index: usize, op: &Op, value: Value) -> Option<((Value, i32), Piece)> {
    match op {
        Op::Piece { x, axis, start, stop, sizes } => {
            // The last piece ends at the end of the axis, whatever its size.
            let stop = (stop < sizes.end()).then_some(*stop);
            let (start, sizes) = (*start, sizes.clone());
            Some(((*x, *axis), Piece { index, value, start, stop, sizes }))
        }
        Op::Slice {
            x,
            axis: Int::Literal(axis),
            start: Int::Literal(start),
            stop: Int::Literal(stop),
            step: 1,
        } => {
            let stop = match stop {
                &i64::MAX => None,
                stop => Some(i32::try_from(*stop).ok().filter(|&stop| stop >= 0)?),
            };
            let start = i32::try_from(*start).ok().filter(|&start| start >= 0)?;
            let axis = i32::try_from(*axis).ok()?;
            Some(((*x, axis), Piece { index, value, start, stop, sizes: 0..=i32::MAX }))
        }
        _ => None,
    }
}

/// Returns the boundaries of pieces, if there are at least two, they are consecutive, and they cover the axis.
fn cuts(pieces: &[Piece]) -> Option<Vec<i32>> {
    let (last, before) = pieces.split_last()?;
    let mut at = Vec::new();
    for piece in before {
        let expected = at.last().copied().unwrap_or(0);
        at.push(piece.stop.filter(|&stop| piece.start == expected && stop > expected)?);
    }
    let same_sizes = before.iter().all(|piece| piece.sizes == last.sizes);
    (last.stop.is_none() && Some(&last.start) == at.last() && same_sizes).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{self, as_type, expand, input, numbered, ops, tensors, transpose};
    use super::*;
    use crate::ir::{Dim, Unary};
    use mlx_rs::Dtype;

    /// The input is 0. The results of `before` are the values 1 and up, and the last `n_outputs` are outputs.
    fn merged(before: Vec<Op>, n_outputs: usize) -> (Vec<Op>, Vec<Out>) {
        let inputs = vec![input(0, &[Dim::UpTo(None)], 15)];
        let mut graph = Graph { inputs, ..fixture::graph(numbered(1, before)) };
        let made = graph.main.instructions.iter().map(|made| made.out);
        graph.main.outputs = made.rev().take(n_outputs).rev().collect();
        merge(&mut graph);
        (ops(&graph), graph.main.outputs)
    }

    fn reshape(x: u32, last: i64) -> Op {
        fixture::reshape(x, &[1, fixture::T, -1, last])
    }

    fn slice(x: u32, start: i64, stop: i64) -> Op {
        fixture::slice(x, 2, start, stop)
    }

    fn neg(x: u32) -> Op {
        fixture::unary(Unary::Neg, x)
    }

    const END: i64 = i64::MAX;

    #[test]
    fn chains_of_views_are_one() {
        assert_eq!(merged(vec![reshape(0, 8), reshape(1, 16)], 1).0, [reshape(0, 16)]);
        assert_eq!(merged(vec![expand(0, 0), reshape(1, 16)], 1).0, [reshape(0, 16)]);
        let rotates = vec![transpose(0, &[2, 0, 1]), transpose(1, &[0, 2, 1])];
        assert_eq!(merged(rotates, 1).0, [transpose(0, &[2, 1, 0])]);
        let back = vec![transpose(0, &[2, 0, 1]), transpose(1, &[1, 2, 0]), neg(2)];
        assert_eq!(merged(back, 1).0, [neg(0)]);
    }

    #[test]
    fn a_reshape_and_a_transposition_are_one() {
        let perm = [0, 2, 1, 3];
        let heads = fixture::view_heads(0, 8);
        assert_eq!(merged(vec![reshape(0, 8), transpose(1, &perm)], 1).0, vec![heads.clone()]);
        let shape = fixture::shape(&[1, fixture::T, -1, 8]);
        let back = Op::TransposeReshape { x: Value(0), perm: perm.to_vec(), shape };
        assert_eq!(merged(vec![transpose(0, &perm), reshape(1, 8)], 1).0, [back]);
        // Of three views, the first two are merged.
        let three = vec![reshape(0, 8), transpose(1, &perm), reshape(2, 8)];
        assert_eq!(merged(three, 1).0, [heads, reshape(2, 8)]);
        // The intermediate value is read.
        let read = vec![reshape(0, 8), transpose(1, &perm), neg(1)];
        assert_eq!(merged(read.clone(), 2).0, read);
    }

    #[test]
    fn what_changes_nothing_goes() {
        let nothing = (vec![], tensors(&[0]));
        assert_eq!(merged(vec![as_type(0, Dtype::Bfloat16), slice(1, 0, END)], 1), nothing);
        let other = vec![as_type(0, Dtype::Float32), slice(1, 1, END)];
        assert_eq!(merged(other.clone(), 1).0, other);
        assert_eq!(merged(vec![transpose(0, &[0, 1])], 1), nothing);
    }

    #[test]
    fn slices_that_make_up_an_axis_are_one_split() {
        let (ops, outputs) = merged(vec![slice(0, 4, END), slice(0, 0, 4)], 2);
        let expected = Op::Split { x: Value(0), axis: 2, at: vec![4], sizes: 0..=i32::MAX };
        assert_eq!(ops, [expected]);
        assert_eq!(outputs, tensors(&[4, 3]));
        let piece = |start, stop| Op::Piece { x: Value(0), axis: 1, start, stop, sizes: 9..=12 };
        let (ops, _) = merged(vec![piece(0, 4), piece(4, 8), piece(8, 12)], 3);
        assert_eq!(ops, [Op::Split { x: Value(0), axis: 1, at: vec![4, 8], sizes: 9..=12 }]);
    }

    #[test]
    fn other_slices_stay() {
        for slices in [
            vec![slice(0, 0, 4)],
            vec![slice(0, 0, 4), slice(0, 5, END)],
            vec![slice(0, 0, 4), slice(0, 4, 8)],
            vec![slice(0, 0, 4), slice(0, 0, 4), slice(0, 4, END)],
            vec![slice(0, 0, -4), slice(0, -4, END)],
            vec![slice(0, 1, 4), slice(0, 4, END)],
        ] {
            assert_eq!(merged(slices.clone(), slices.len()).0, slices);
        }
    }
}
