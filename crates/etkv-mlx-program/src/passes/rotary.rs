//! Recognises the rotary embedding formula that exporters write, and replaces it by MLX's function.
//!
//! Exporters write `x * cos + rotate_half(x) * sin` in seven instructions for the queries and seven for the keys. Six
//! of the seven launch a GPU kernel. MLX's function takes one kernel launch, for any positions.

use std::collections::HashMap;

use mlx_rs::Dtype;

use super::{insert, makers, positions};
use crate::ir::{Binary, Graph, Instruction, Int, Op, Out, Unary, Value};

/// The operands from which a rotary embedding's angles are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Angles {
    /// The positions, an input `[T]`.
    positions: Value,
    /// The constant with the angle per position of each pair of elements.
    inverse: Value,
}

/// Replaces each rotary embedding by one instruction. `scalars` are the values of constants with one element.
pub fn fuse(graph: &mut Graph, scalars: &HashMap<Value, f32>) {
    let views = positions::views(graph);
    let found: Vec<(usize, RotaryMatch)> = {
        let finder = Finder { graph, makers: makers(graph), views, scalars };
        let sums = graph.main.instructions.iter().enumerate();
        sums.filter_map(|(at, sum)| Some((at, finder.rotary(&sum.op)?))).collect()
    };
    let Some(&(first, _)) = found.first() else {
        return;
    };
    // Offsets and periods are created once, before the first instruction that reads them.
    let mut shared = HashMap::<Angles, [Value; 2]>::new();
    let mut made = Vec::new();
    for (at, RotaryMatch { x, angles, dtype }) in found {
        let [offsets, periods] = *shared.entry(angles).or_insert_with(|| {
            let ops = [
                Op::AsType { x: angles.positions, dtype: Dtype::Int32 },
                Op::RotaryPeriods { inverse: angles.inverse },
            ];
            ops.map(|op| {
                let value = graph.new_value();
                made.push((first, Instruction { op, out: Out::Tensor(value) }));
                value
            })
        });
        graph.main.instructions[at].op = Op::Rotary { x, offsets, periods, dtype };
    }
    insert(graph, made);
}

/// A rotary embedding of `x`.
struct RotaryMatch {
    x: Value,
    angles: Angles,
    dtype: Dtype,
}

struct Finder<'a> {
    graph: &'a Graph,
    makers: HashMap<Value, usize>,
    views: HashMap<Value, Value>,
    scalars: &'a HashMap<Value, f32>,
}

impl Finder<'_> {
    fn op(&self, value: Value) -> Option<&Op> {
        super::maker(self.graph, &self.makers, value)
    }

    fn product(&self, value: Value) -> Option<[Value; 2]> {
        match *self.op(value)? {
            Op::Binary { function: Binary::Multiply, a, b } => Some([a, b]),
            _ => None,
        }
    }

    /// Returns the rotary embedding, if the instruction is the sum of a product with cosines and a product
    /// with sines.
    fn rotary(&self, sum: &Op) -> Option<RotaryMatch> {
        let Op::Binary { function: Binary::Add, a, b } = *sum else {
            return None;
        };
        let [a, b] = [self.product(a)?, self.product(b)?];
        let both = |[p, q]: [Value; 2]| [[p, q], [q, p]];
        let pairs = both(a).into_iter().flat_map(|a| both(b).map(|b| (a, b)));
        let all = pairs.flat_map(|(a, b)| [(a, b), (b, a)]);
        all.into_iter().find_map(|([x, cos], [rotated, sin])| {
            let half = self.rotated_half(x, rotated)?;
            let (angles, dtype) = self.table(cos, Unary::Cos, half)?;
            let same = self.table(sin, Unary::Sin, half)? == (angles, dtype);
            same.then_some(RotaryMatch { x, angles, dtype })
        })
    }

    /// Returns `h` if `rotated` is `[-x[h..], x[..h]]` along the last axis.
    fn rotated_half(&self, x: Value, rotated: Value) -> Option<i64> {
        let Op::Concatenate { tensors, axis: -1 | 3 } = self.op(rotated)? else {
            return None;
        };
        let [negated, front] = tensors[..] else {
            return None;
        };
        let Op::Unary { function: Unary::Neg, x: back } = *self.op(negated)? else {
            return None;
        };
        let (half, _) = self.part(x, front).filter(|&(stop, start)| start == 0 && stop > 0)?;
        let (stop, start) = self.part(x, back)?;
        (start == half && (stop == i64::MAX || stop == 2 * half)).then_some(half)
    }

    /// Returns the end and the start of `part`, if it is a slice of the last axis of `x`, `[1, heads, T, head_dim]`.
    fn part(&self, x: Value, part: Value) -> Option<(i64, i64)> {
        match *self.op(part)? {
            Op::Slice {
                x: of,
                axis: Int::Literal(-1 | 3),
                start: Int::Literal(start),
                stop: Int::Literal(stop),
                step: 1,
            } if of == x => Some((stop, start)),
            _ => None,
        }
    }

    /// Returns the angles and the dtype of a table `[1, 1, T, 2 * half]` of cosines or sines.
    fn table(&self, table: Value, function: Unary, half: i64) -> Option<(Angles, Dtype)> {
        let Op::ExpandDims { x: mut value, axis: 1 } = *self.op(table)? else {
            return None;
        };
        let mut dtype = Dtype::Float32;
        if let Op::AsType { x, dtype: stored } = *self.op(value)? {
            (value, dtype) = (x, stored);
        }
        if let Some([a, b]) = self.product(value) {
            // Some methods for longer contexts scale the table.
            let is_one = |value| self.scalars.get(&value) == Some(&1.0);
            value = if is_one(b) { a } else { is_one(a).then_some(b)? };
        }
        let Op::Unary { function: found, x: doubled } = *self.op(value)? else {
            return None;
        };
        let Op::Concatenate { tensors, axis: -1 | 2 } = self.op(doubled)? else {
            return None;
        };
        let [angle, again] = tensors[..] else {
            return None;
        };
        if found != function || angle != again {
            return None;
        }
        let [a, b] = self.product(angle)?;
        let of = |places: Value, inverse: Value| {
            let Op::AsType { x, dtype: Dtype::Float32 } = *self.op(places)? else {
                return None;
            };
            let positions = *self.views.get(&x)?;
            let constant = self.graph.constants.get(inverse.0 as usize)?;
            let (&last, before) = constant.shape.split_last()?;
            let fits = i64::from(last) == half && before.iter().all(|&size| size == 1);
            let stays = !self.graph.init_targets.contains(&inverse);
            (fits && stays && constant.dtype == Dtype::Float32)
                .then_some(Angles { positions, inverse })
        };
        Some((of(a, b).or_else(|| of(b, a))?, dtype))
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{self, add, as_type, concatenate, constant, expand, input};
    use super::super::fixture::{multiply, numbered, ops, slice, unary};
    use super::*;
    use crate::ir::{Dim, Index};

    /// Positions are value 2, `x` is 3; constants are 0 and 1.
    fn graph() -> Graph {
        let any = Dim::UpTo(None);
        let made = [
            expand(2, 0),               // 4
            expand(4, 2),               // 5
            as_type(5, Dtype::Float32), // 6
            multiply(6, 0),             // 7
            concatenate(&[7, 7], -1),   // 8
            unary(Unary::Cos, 8),       // 9
            multiply(9, 1),             // 10
            expand(10, 1),              // 11
            unary(Unary::Sin, 8),       // 12
            multiply(1, 12),            // 13
            expand(13, 1),              // 14
            multiply(3, 11),            // 15
            slice(3, 3, 0, 4),          // 16
            slice(3, 3, 4, i64::MAX),   // 17
            unary(Unary::Neg, 17),      // 18
            concatenate(&[18, 16], -1), // 19
            multiply(19, 14),           // 20
            add(15, 20),                // 21
        ];
        Graph {
            constants: vec![constant("", &[1, 1, 4]), constant("", &[])],
            inputs: vec![
                input(2, &[any], 4),
                input(3, &[Dim::Static(1), Dim::Static(2), any, Dim::Static(8)], 6),
            ],
            ..fixture::graph(numbered(4, made))
        }
    }

    fn fused(change: impl FnOnce(&mut Graph), scale: f32) -> Option<Op> {
        let mut graph = graph();
        change(&mut graph);
        fuse(&mut graph, &HashMap::from([(Value(1), scale)]));
        ops(&graph).pop().filter(|op| matches!(op, Op::Rotary { .. }))
    }

    #[test]
    fn an_embedding_is_one_instruction() {
        let mut graph = graph();
        fuse(&mut graph, &HashMap::from([(Value(1), 1.0)]));
        super::super::dead::eliminate(&mut graph);
        let [offsets, periods] = [Value(22), Value(23)];
        assert_eq!(
            ops(&graph),
            [
                as_type(2, Dtype::Int32),
                Op::RotaryPeriods { inverse: Value(0) },
                Op::Rotary { x: Value(3), offsets, periods, dtype: Dtype::Float32 },
            ]
        );
    }

    #[test]
    fn what_differs_stays() {
        assert!(fused(|_| {}, 1.0).is_some());
        assert!(fused(|_| {}, 1.5).is_none(), "a scaled table");
        let first = Op::Take { x: Value(2), index: Index::One(Int::Literal(0)), axis: 0 };
        for (at, op, what) in [
            (8, unary(Unary::Cos, 8), "cosines twice"),
            (14, unary(Unary::Neg, 16), "the first half twice"),
            (15, concatenate(&[16, 18], -1), "rotated the other way"),
            (0, first, "only the first position"),
        ] {
            assert!(fused(|graph| graph.main.instructions[at].op = op, 1.0).is_none(), "{what}");
        }
        assert!(
            fused(|graph| graph.constants[0].shape = vec![1, 1, 8], 1.0).is_none(),
            "more pairs"
        );
        assert!(
            fused(|graph| graph.init_targets = vec![Value(0)], 1.0).is_none(),
            "replaced at load"
        );
    }
}
