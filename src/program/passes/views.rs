//! Merges chains of views: reshapes, transpositions and slices, and removes those that change
//! nothing.
//!
//! A view moves no elements, but MLX builds, schedules and frees a node for each. A decode step has
//! one token. Its heads need no transposition then, and one reshape does the work of two views.

use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;

use super::{dead, dtypes, maker, makers};
use crate::program::ir::{Graph, Instruction, Int, Op, Out, Value};

/// Merges the views of the main chain. Results keep every bit.
pub fn merge(graph: &mut Graph) {
    skip_through(graph);
    pair(graph);
    split(graph);
    dead::eliminate(graph);
}

/// Lets views read what the views before them read, and removes those without effect.
fn skip_through(graph: &mut Graph) {
    let dtypes = dtypes::known(graph);
    let mut renamed = HashMap::<Value, Value>::new();
    // The views so far, each with what it reads after the changes.
    let mut views = HashMap::<Value, Op>::new();
    for Instruction { op, out } in &mut graph.main.instructions {
        op.for_each_read(|value| *value = *renamed.get(value).unwrap_or(value));
        let Out::Tensor(value) = *out else { continue };
        match op {
            Op::Reshape { x, .. } => {
                // The elements and their order are those that the other view reads.
                if let Some(Op::Reshape { x: read, .. } | Op::ExpandDims { x: read, .. }) =
                    views.get(x)
                {
                    *x = *read;
                }
            }
            Op::Transpose { x, perm } => {
                let inner = match views.get(x) {
                    Some(Op::Transpose { x, perm }) => Some((*x, perm)),
                    _ => None,
                };
                if let Some((read, both)) =
                    inner.and_then(|(read, inner)| Some((read, composed(inner, perm)?)))
                {
                    (*x, *perm) = (read, both);
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

/// Returns the transposition that does `first`, then `second`; `None` if they do not fit.
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

/// Makes one instruction of a reshape and a transposition that follow each other, if nothing else
/// reads the value between.
fn pair(graph: &mut Graph) {
    let mut n_uses = HashMap::<Value, usize>::new();
    for value in graph.main.uses() {
        *n_uses.entry(value).or_default() += 1;
    }
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
    for (index, before, op) in paired {
        // The first of three views pairs with the second, and then the third stays.
        if !gone[index] && !std::mem::replace(&mut gone[before], true) {
            graph.main.instructions[index].op = op;
        }
    }
    let mut gone = gone.into_iter();
    graph.main.instructions.retain(|_| !gone.next().unwrap_or(false));
}

/// A piece of a tensor: where it starts and stops, and the sizes that the axis may have.
struct Piece {
    index: usize,
    value: Value,
    start: i32,
    /// `None` is the end of the axis.
    stop: Option<i32>,
    sizes: RangeInclusive<i32>,
}

/// Makes one instruction of slices that cut an axis into pieces.
fn split(graph: &mut Graph) {
    let mut found = BTreeMap::<(Value, i32), Vec<Piece>>::new();
    for (index, instruction) in graph.main.instructions.iter().enumerate() {
        let Out::Tensor(value) = instruction.out else { continue };
        if let Some((x, axis, start, stop, sizes)) = piece(&instruction.op) {
            let piece = Piece { index, value, start, stop, sizes };
            found.entry((x, axis)).or_default().push(piece);
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
    let mut gone = gone.into_iter();
    graph.main.instructions.retain(|_| !gone.next().unwrap_or(false));
    graph.rename(&renamed);
}

/// Returns the operand, the axis, the bounds and the sizes of a slice with fixed bounds.
fn piece(op: &Op) -> Option<(Value, i32, i32, Option<i32>, RangeInclusive<i32>)> {
    match op {
        Op::Piece { x, axis, start, stop, sizes } => {
            // The last piece goes to the end of the axis, wherever that is.
            let stop = (stop < sizes.end()).then_some(*stop);
            Some((*x, *axis, *start, stop, sizes.clone()))
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
            Some((*x, i32::try_from(*axis).ok()?, start, stop, 0..=i32::MAX))
        }
        _ => None,
    }
}

/// Returns where pieces in order cut the axis, if they make up all of it and are at least two.
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
