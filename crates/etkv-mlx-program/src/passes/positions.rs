//! Finds positions that come unchanged from an input, so that they are read on the host, without waiting for
//! the device.

use crate::ir::{Graph, Index, InputSpec, Instruction, Int, Op, Out, Value};
use std::collections::HashMap;

/// The maximum axes of positions: more than any program has, and few enough to copy for every view.
const MAX_AXES: usize = 8;

/// Makes every cache op read its positions directly from an input, if the positions are the elements of that input in
/// order.
pub fn trace(graph: &mut Graph) {
    let views = views(graph);
    for instruction in &mut graph.main.instructions {
        if let Some(position) = instruction.op.position_mut() {
            if let Some(input) = views.get(position) {
                *position = *input;
            }
        }
    }
}

/// Returns the integer inputs `[T]` and the views of them that have the same elements in the same order, each with
/// its input.
pub fn views(graph: &Graph) -> HashMap<Value, Value> {
    let mut views: HashMap<Value, (Value, Vec<Axis>)> = graph
        .inputs
        .iter()
        .filter_map(|input| match input {
            InputSpec::Tensor { value, shape, scalar_type: 3 | 4, .. } if shape.len() == 1 => {
                Some((*value, (*value, vec![Axis::Tokens])))
            }
            _ => None,
        })
        .collect();
    for Instruction { op, out } in &graph.main.instructions {
        if let Out::Tensor(value) = *out {
            let view = viewed(op)
                .and_then(|x| views.get(&x))
                .and_then(|(input, axes)| apply(op, axes.clone()).map(|axes| (*input, axes)));
            views.extend(view.map(|view| (value, view)));
        }
    }
    views.into_iter().map(|(view, (input, _))| (view, input)).collect()
}

/// Returns the operand of an operation that may keep every element.
fn viewed(op: &Op) -> Option<Value> {
    match op {
        Op::ExpandDims { x, .. } | Op::Reshape { x, .. } | Op::Take { x, .. } => Some(*x),
        Op::AsType { x, dtype } => is_wide_int(*dtype).then_some(*x),
        _ => None,
    }
}

fn is_wide_int(dtype: mlx_rs::Dtype) -> bool {
    matches!(dtype, mlx_rs::Dtype::Int32 | mlx_rs::Dtype::Int64)
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Axis {
    One,
    Tokens,
}

/// Returns the axes after an operation, or `None` if it may drop or reorder elements.
fn apply(op: &Op, mut axes: Vec<Axis>) -> Option<Vec<Axis>> {
    match op {
        Op::AsType { .. } => Some(axes),
        Op::ExpandDims { axis, .. } => {
            let n = axes.len() as i32 + 1;
            let at = usize::try_from(if *axis < 0 { axis + n } else { *axis }).ok()?;
            (at <= axes.len() && axes.len() < MAX_AXES).then(|| axes.insert(at, Axis::One))?;
            Some(axes)
        }
        Op::Take { index: Index::One(Int::Literal(0)), axis, .. } => {
            let n = axes.len() as i32;
            let at = usize::try_from(if *axis < 0 { axis + n } else { *axis }).ok()?;
            (axes.get(at) == Some(&Axis::One)).then(|| axes.remove(at))?;
            Some(axes)
        }
        // A reshape keeps the order. The open dimension is that of the tokens.
        Op::Reshape { shape, .. } if shape.len() <= MAX_AXES => {
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
    use super::super::fixture::{as_type, expand, reshape};
    use super::*;
    use mlx_rs::Dtype;

    fn axes_after(ops: &[Op]) -> Option<Vec<Axis>> {
        ops.iter().try_fold(vec![Axis::Tokens], |axes, op| apply(op, axes))
    }

    fn take_first(axis: i32) -> Op {
        Op::Take { x: Value(0), index: Index::One(Int::Literal(0)), axis }
    }

    #[test]
    fn views_that_keep_every_element_are_seen_through() {
        use Axis::{One, Tokens};
        let exported = [expand(0, 0), take_first(0), reshape(0, &[-1, 1])];
        assert_eq!(axes_after(&exported), Some(vec![Tokens, One]));
        assert_eq!(axes_after(&[expand(0, -1)]), Some(vec![Tokens, One]));
        assert_eq!(axes_after(&[as_type(0, Dtype::Int32), expand(0, 1)]), Some(vec![Tokens, One]));
    }

    #[test]
    fn views_that_drop_elements_are_not() {
        assert_eq!(axes_after(&[take_first(0)]), None, "the first token of many");
        assert_eq!(axes_after(&[expand(0, 0), take_first(1)]), None);
        assert_eq!(axes_after(&[reshape(0, &[2, -1])]), None);
        assert_eq!(axes_after(&[reshape(0, &[1, 1])]), None);
        assert_eq!(axes_after(&[expand(0, 5)]), None);
    }
}
