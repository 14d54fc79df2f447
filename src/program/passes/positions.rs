//! Finds positions that come straight from an input, so that they are read where
//! the host left them, with no wait for the device.

use super::{maker, makers};
use crate::program::ir::{Graph, Index, InputSpec, Int, Op, Value};
use std::collections::HashMap;

/// Makes every cache op whose positions are an input, element for element, read
/// that input.
pub fn trace(graph: &mut Graph) {
    let makers = makers(graph);
    let traced: Vec<Option<Value>> = graph
        .main
        .instructions
        .iter()
        .map(|instruction| match instruction.op {
            Op::UpdateAndAttend { position, .. } => source(graph, &makers, position),
            _ => None,
        })
        .collect();
    for (instruction, input) in graph.main.instructions.iter_mut().zip(traced) {
        if let (Op::UpdateAndAttend { position, .. }, Some(input)) = (&mut instruction.op, input) {
            *position = input;
        }
    }
}

/// The input `[T]` that has the elements of `value`, in order.
fn source(graph: &Graph, makers: &HashMap<Value, usize>, value: Value) -> Option<Value> {
    // From the op up to the input: views that keep the elements.
    let mut path = Vec::new();
    let mut at = value;
    while let Some(op) = maker(graph, makers, at) {
        at = match op {
            Op::ExpandDims { x, .. } | Op::Reshape { x, .. } | Op::Take { x, .. } => *x,
            Op::AsType { x, dtype } if is_wide_int(*dtype) => *x,
            _ => return None,
        };
        path.push(op);
    }
    let is_flat_input = graph.inputs.iter().any(|input| {
        matches!(input, InputSpec::Tensor { value, shape, scalar_type, .. }
            if *value == at && shape.len() == 1 && matches!(scalar_type, 3 | 4))
    });
    if !is_flat_input {
        return None;
    }
    // And down again, with the shape: axes of one element, and the axis of tokens.
    let mut axes = vec![Axis::Tokens];
    for op in path.into_iter().rev() {
        axes = apply(op, axes)?;
    }
    Some(at)
}

fn is_wide_int(dtype: mlx_rs::Dtype) -> bool {
    matches!(dtype, mlx_rs::Dtype::Int32 | mlx_rs::Dtype::Int64)
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Axis {
    One,
    Tokens,
}

/// The axes after an operation; `None` where it may drop or reorder elements.
fn apply(op: &Op, mut axes: Vec<Axis>) -> Option<Vec<Axis>> {
    match op {
        Op::AsType { .. } => Some(axes),
        Op::ExpandDims { axis, .. } => {
            let n = axes.len() as i32 + 1;
            let at = usize::try_from(if *axis < 0 { axis + n } else { *axis }).ok()?;
            (at <= axes.len()).then(|| axes.insert(at, Axis::One))?;
            Some(axes)
        }
        Op::Take { index: Index::One(Int::Literal(0)), axis, .. } => {
            let n = axes.len() as i32;
            let at = usize::try_from(if *axis < 0 { axis + n } else { *axis }).ok()?;
            (axes.get(at) == Some(&Axis::One)).then(|| axes.remove(at))?;
            Some(axes)
        }
        // A reshape keeps the order; its one open dimension is the tokens'.
        Op::Reshape { shape, .. } => {
            let axes: Vec<Axis> = shape
                .iter()
                .map(|dim| match dim {
                    Int::Literal(1) => Some(Axis::One),
                    Int::Literal(-1) => Some(Axis::Tokens),
                    _ => None,
                })
                .collect::<Option<_>>()?;
            (axes.iter().filter(|&&axis| axis == Axis::Tokens).count() == 1).then_some(axes)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlx_rs::Dtype;

    fn axes_after(ops: &[Op]) -> Option<Vec<Axis>> {
        ops.iter().try_fold(vec![Axis::Tokens], |axes, op| apply(op, axes))
    }

    fn expand(axis: i32) -> Op {
        Op::ExpandDims { x: Value(0), axis }
    }

    fn take_first(axis: i32) -> Op {
        Op::Take { x: Value(0), index: Index::One(Int::Literal(0)), axis }
    }

    fn reshape(shape: &[i64]) -> Op {
        Op::Reshape { x: Value(0), shape: shape.iter().map(|&dim| Int::Literal(dim)).collect() }
    }

    #[test]
    fn views_that_keep_every_element_are_seen_through() {
        use Axis::{One, Tokens};
        let exported = [expand(0), take_first(0), reshape(&[-1, 1])];
        assert_eq!(axes_after(&exported), Some(vec![Tokens, One]));
        assert_eq!(axes_after(&[expand(-1)]), Some(vec![Tokens, One]));
        let cast = Op::AsType { x: Value(0), dtype: Dtype::Int32 };
        assert_eq!(axes_after(&[cast, expand(1)]), Some(vec![Tokens, One]));
    }

    #[test]
    fn views_that_drop_elements_are_not() {
        assert_eq!(axes_after(&[take_first(0)]), None, "the first token of many");
        assert_eq!(axes_after(&[expand(0), take_first(1)]), None);
        assert_eq!(axes_after(&[reshape(&[2, -1])]), None);
        assert_eq!(axes_after(&[reshape(&[1, 1])]), None);
        assert_eq!(axes_after(&[expand(5)]), None);
    }
}
