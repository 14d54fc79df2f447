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

    /// Returns the embedding, if the instruction is the sum of a product with cosines and a product with sines.
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
    use super::*;
    use crate::ir::{Chain, Constant, Dim, InputSpec};

    /// Positions are value 2, `x` is 3; constants are 0 and 1.
    fn graph() -> Graph {
        let constant = |shape: &[i32]| Constant {
            name: String::new(),
            shape: shape.to_vec(),
            dtype: Dtype::Float32,
            joined: Vec::new(),
        };
        let input = |value, shape: &[Dim], scalar_type| InputSpec::Tensor {
            value: Value(value),
            name: String::new(),
            shape: shape.to_vec(),
            scalar_type,
        };
        let any = Dim::UpTo(None);
        let v = Value;
        let slice = |start, stop| Op::Slice {
            x: v(3),
            axis: Int::Literal(3),
            start: Int::Literal(start),
            stop: Int::Literal(stop),
            step: 1,
        };
        let product = |a, b| Op::Binary { function: Binary::Multiply, a: v(a), b: v(b) };
        let unary = |function, x| Op::Unary { function, x: v(x) };
        let ops = [
            Op::ExpandDims { x: v(2), axis: 0 },                       // 4
            Op::ExpandDims { x: v(4), axis: 2 },                       // 5
            Op::AsType { x: v(5), dtype: Dtype::Float32 },             // 6
            product(6, 0),                                             // 7
            Op::Concatenate { tensors: vec![v(7); 2], axis: -1 },      // 8
            unary(Unary::Cos, 8),                                      // 9
            product(9, 1),                                             // 10
            Op::ExpandDims { x: v(10), axis: 1 },                      // 11
            unary(Unary::Sin, 8),                                      // 12
            product(1, 12),                                            // 13
            Op::ExpandDims { x: v(13), axis: 1 },                      // 14
            product(3, 11),                                            // 15
            slice(0, 4),                                               // 16
            slice(4, i64::MAX),                                        // 17
            unary(Unary::Neg, 17),                                     // 18
            Op::Concatenate { tensors: vec![v(18), v(16)], axis: -1 }, // 19
            product(19, 14),                                           // 20
            Op::Binary { function: Binary::Add, a: v(15), b: v(20) },  // 21
        ];
        let instructions =
            (4..).zip(ops).map(|(out, op)| Instruction { op, out: Out::Tensor(v(out)) });
        Graph {
            constants: vec![constant(&[1, 1, 4]), constant(&[])],
            inputs: vec![
                input(2, &[any], 4),
                input(3, &[Dim::Static(1), Dim::Static(2), any, Dim::Static(8)], 6),
            ],
            main: Chain { instructions: instructions.collect(), outputs: vec![Out::Tensor(v(21))] },
            n_values: 22,
            ..Graph::default()
        }
    }

    fn fused(change: impl FnOnce(&mut Graph), scale: f32) -> Option<Op> {
        let mut graph = graph();
        change(&mut graph);
        fuse(&mut graph, &HashMap::from([(Value(1), scale)]));
        let last = graph.main.instructions.pop().map(|instruction| instruction.op);
        last.filter(|op| matches!(op, Op::Rotary { .. }))
    }

    #[test]
    fn an_embedding_is_one_instruction() {
        let mut graph = graph();
        fuse(&mut graph, &HashMap::from([(Value(1), 1.0)]));
        super::super::dead::eliminate(&mut graph);
        let ops: Vec<Op> = graph.main.instructions.into_iter().map(|made| made.op).collect();
        let [offsets, periods] = [Value(22), Value(23)];
        assert_eq!(
            ops,
            [
                Op::AsType { x: Value(2), dtype: Dtype::Int32 },
                Op::RotaryPeriods { inverse: Value(0) },
                Op::Rotary { x: Value(3), offsets, periods, dtype: Dtype::Float32 },
            ]
        );
    }

    #[test]
    fn what_differs_stays() {
        assert!(fused(|_| {}, 1.0).is_some());
        assert!(fused(|_| {}, 1.5).is_none(), "a scaled table");
        let replace =
            |at: usize, op: Op| move |graph: &mut Graph| graph.main.instructions[at].op = op;
        let v = Value;
        let cosine = Op::Unary { function: Unary::Cos, x: v(8) };
        assert!(fused(replace(8, cosine), 1.0).is_none(), "cosines twice");
        let back = Op::Unary { function: Unary::Neg, x: v(16) };
        assert!(fused(replace(14, back), 1.0).is_none(), "the first half twice");
        let swapped = Op::Concatenate { tensors: vec![v(16), v(18)], axis: -1 };
        assert!(fused(replace(15, swapped), 1.0).is_none(), "rotated the other way");
        let first = Op::Take { x: v(2), index: crate::ir::Index::One(Int::Literal(0)), axis: 0 };
        assert!(fused(replace(0, first), 1.0).is_none(), "only the first position");
        assert!(
            fused(|graph| graph.constants[0].shape = vec![1, 1, 8], 1.0).is_none(),
            "more pairs"
        );
        assert!(fused(|graph| graph.init_targets = vec![v(0)], 1.0).is_none(), "replaced at load");
    }
}
