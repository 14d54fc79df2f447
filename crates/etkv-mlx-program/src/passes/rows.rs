//! Finds the values of a program that are computed row by row, with one row for each token.

use std::collections::{HashMap, HashSet};

use crate::ir::{
    Dim, Function, Graph, Index, InputSpec, Int, IntValue, OneAxis, Op, Out, RecurrentFunction,
    Reduction, Value,
};

/// Values, with the number of axes of each.
type Ranks = HashMap<Value, usize>;

/// The axes of rows that are split into heads.
const HEAD_AXES: usize = 4;

/// The properties of the program's rows.
#[derive(Default)]
pub struct Rows {
    /// The integers that are the number of tokens.
    pub counts: HashSet<IntValue>,
    /// The first such integer that the program computes.
    pub count: Option<IntValue>,
    /// The integer tensors `[1, T]` with one element per token: ids and positions.
    ids: HashSet<Value>,
    /// The values with at most one axis that are computed from constants. They are the same for every row.
    constants: HashSet<Value>,
    /// The values of at least 3 axes whose second axis is that of the tokens, `[1, T, ...]`.
    by_row: Ranks,
    /// The values that are computed from the last row of a value in `by_row`, `[1, 1, ...]`.
    single: Ranks,
    /// Rows that are split into heads, `[1, T, heads, head_dim]`.
    cut: Ranks,
    /// Heads with their axes in the order of attention, `[1, heads, T, head_dim]`, and values that are computed from
    /// such heads token by token, such as rotated queries.
    heads: HashSet<Value>,
    /// Rows with their axes in the order of convolutions, `[1, channels, T]`, and the results of recurrent layers'
    /// convolutions. Values that are computed from these token by token count too.
    columns: HashSet<Value>,
    /// The results of attention and of recurrences, `[1, heads, T, head_dim]`.
    attended: HashSet<Value>,
    /// The results of attention that have only one reader and are no output. Their attention can be narrowed to the
    /// last query.
    pub narrowable: HashSet<Value>,
}

impl Rows {
    /// Examines the main chain.
    pub fn find(graph: &Graph) -> Self {
        let mut rows = Self::default();
        let mut positions = HashSet::new();
        for input in &graph.inputs {
            if let InputSpec::Tensor { value, shape, .. } = input {
                match shape[..] {
                    [Dim::Static(1), Dim::UpTo(_)] => rows.ids.insert(*value),
                    [Dim::UpTo(_)] => positions.insert(*value),
                    _ => false,
                };
            }
        }
        let n_uses = graph.main.n_uses();
        let outputs: HashSet<Value> = graph.main.tensor_outputs().collect();
        for instruction in &graph.main.instructions {
            match (&instruction.op, instruction.out) {
                (&Op::SymSize { x, dim }, Out::Int(value))
                    if rows.has_tokens_at(x, dim)
                        || (positions.contains(&x) && matches!(dim, 0 | -1)) =>
                {
                    rows.counts.insert(value);
                    rows.count.get_or_insert(value);
                }
                (Op::UpdateRecurrent(call), Out::Tensor(value)) => {
                    match call.function {
                        RecurrentFunction::Convolve { .. } => rows.columns.insert(value),
                        RecurrentFunction::Scan { .. } | RecurrentFunction::FusedScan { .. } => {
                            rows.attended.insert(value)
                        }
                    };
                }
                (op, Out::Tensor(value)) if rows.attends(op) => {
                    rows.attended.insert(value);
                    if n_uses.get(&value) == Some(&1) && !outputs.contains(&value) {
                        rows.narrowable.insert(value);
                    }
                }
                (Op::ExpandDims { x, axis: 0 }, Out::Tensor(value)) if positions.contains(x) => {
                    rows.ids.insert(value);
                }
                (op, Out::Tensor(value)) if rows.is_computed_constant(op, graph) => {
                    rows.constants.insert(value);
                }
                (op, Out::Tensor(value)) if rows.makes_ids(op, graph) => {
                    rows.ids.insert(value);
                }
                (op, Out::Tensor(value)) => {
                    if let Some(rank) = rows.rank(op, graph) {
                        rows.by_row.insert(value, rank);
                    } else if let Some(rank) = rows.rank_of_single(op, graph) {
                        rows.single.insert(value, rank);
                    }
                    if rows.cuts(op, graph) {
                        rows.cut.insert(value, HEAD_AXES);
                    } else if rows.has_columns(op) {
                        rows.columns.insert(value);
                    } else if rows.has_heads(op) {
                        rows.heads.insert(value);
                    }
                }
                _ => {}
            }
        }
        rows
    }

    /// Returns whether an axis of a value is that of the tokens.
    fn has_tokens_at(&self, x: Value, axis: i32) -> bool {
        let rank = if self.ids.contains(&x) { Some(2) } else { self.by_row.get(&x).copied() };
        rank.is_some_and(|rank| axis == 1 || axis == 1 - rank as i32)
    }

    /// Returns whether an instruction is attention of the step's tokens: the op with the cache, or MLX's function
    /// with queries that are computed token by token. Keys and values of MLX's function may come from a cache in the
    /// graph.
    fn attends(&self, op: &Op) -> bool {
        match op {
            Op::UpdateAndAttend { .. } => true,
            Op::Call { function: Function::Sdpa { .. }, tensors, .. } => {
                tensors.first().is_some_and(|q| self.heads.contains(q))
            }
            _ => false,
        }
    }

    /// Returns whether an instruction computes `[1, T, heads, head_dim]`, each row from the same row of its operands.
    fn cuts(&self, op: &Op, graph: &Graph) -> bool {
        match op {
            Op::Reshape { x, shape } => {
                self.by_row.contains_key(x)
                    && matches!(
                        shape[..],
                        [Int::Literal(1), Int::Value(count), Int::Literal(_), Int::Literal(_)]
                            if self.counts.contains(&count)
                    )
            }
            // Norms of heads.
            op => self.row_by_row(op, graph, &self.cut).is_some(),
        }
    }

    /// Returns whether an instruction computes `[1, heads, T, head_dim]` token by token.
    fn has_heads(&self, op: &Op) -> bool {
        let heads = &self.heads;
        match op {
            Op::Transpose { x, perm } => perm[..] == [0, 2, 1, 3] && self.cut.contains_key(x),
            Op::Unary { x, .. }
            | Op::AsType { x, .. }
            | Op::RmsNorm { x, .. }
            | Op::LayerNorm { x, .. }
            | Op::Rotary { x, .. } => heads.contains(x),
            Op::Piece { x, axis: 3 | -1, .. } | Op::Slice { x, axis: Int::Literal(3 | -1), .. } => {
                heads.contains(x)
            }
            Op::Concatenate { tensors, axis: 3 | -1 } => tensors.iter().all(|x| heads.contains(x)),
            // The other operand, such as the cosines of the tokens' angles, broadcasts along the heads. Attention
            // checks when it runs that tokens were not broadcast.
            Op::Binary { a, b, .. } => heads.contains(a) || heads.contains(b),
            Op::Call { function: Function::Rope { .. }, tensors, .. } => {
                tensors.first().is_some_and(|x| heads.contains(x))
            }
            _ => false,
        }
    }

    /// Returns whether an instruction computes `[1, channels, T]` token by token.
    fn has_columns(&self, op: &Op) -> bool {
        let columns = &self.columns;
        match op {
            Op::Transpose { x, perm } => perm[..] == [0, 2, 1] && self.by_row.get(x) == Some(&3),
            Op::Unary { x, .. } | Op::AsType { x, .. } | Op::Piece { x, axis: 1 | -2, .. } => {
                columns.contains(x)
            }
            Op::Binary { a, b, .. } => columns.contains(a) && columns.contains(b),
            _ => false,
        }
    }

    /// Returns whether a value is computed from the last row only.
    pub fn is_single(&self, value: Value) -> bool {
        self.single.contains_key(&value)
    }

    /// Returns whether a value is the same for every row.
    fn is_constant(&self, graph: &Graph, value: Value) -> bool {
        self.constants.contains(&value) || is_row_constant(graph, value)
    }

    /// Returns whether an instruction computes a value that is the same for every row, from other such values.
    fn is_computed_constant(&self, op: &Op, graph: &Graph) -> bool {
        match op {
            Op::Call { function: Function::Full { .. }, ints, .. } => ints.is_empty(),
            op => elementwise(op).is_some_and(|read| {
                !read.is_empty() && read.iter().all(|&x| self.is_constant(graph, x))
            }),
        }
    }

    /// Returns whether an instruction computes integers `[1, T]`, one for each token.
    fn makes_ids(&self, op: &Op, graph: &Graph) -> bool {
        elementwise(op).is_some_and(|read| {
            read.iter().any(|x| self.ids.contains(x))
                && read.iter().all(|&x| self.ids.contains(&x) || self.is_constant(graph, x))
        })
    }

    /// Returns the number of axes of an instruction's result, if it has rows.
    fn rank(&self, op: &Op, graph: &Graph) -> Option<usize> {
        match op {
            Op::Take { x, index: Index::Many(index), axis: 0 } => {
                (is_matrix(graph, *x) && self.ids.contains(index)).then_some(3)
            }
            Op::Take { x, index: Index::One(_), .. } => {
                self.read_by(op, graph).map(|_| self.by_row[x] - 1)
            }
            Op::Dequantize { w, .. } => self.by_row.get(w).copied(),
            Op::Transpose { x, perm } => match perm[..] {
                [0, 2, 1, 3] => self.attended.contains(x).then_some(4),
                [0, 2, 1] => self.columns.contains(x).then_some(3),
                _ => None,
            },
            // A result of shape `[1, T, ...]` has rows even if the operand is not computed row by row, as in
            // a mixture of experts.
            Op::Reshape { shape, .. } => self.counts_tokens(shape).then_some(shape.len()),
            op => self.by_row.get(self.read_by(op, graph)?.first()?).copied(),
        }
    }

    fn rank_of_single(&self, op: &Op, graph: &Graph) -> Option<usize> {
        if let Some(x) = self.last_row_of(op) {
            return self.by_row.get(&x).copied();
        }
        let read = self.row_by_row(op, graph, &self.single)?;
        self.single.get(read.first()?).copied()
    }

    /// Returns the operands of an instruction that computes each row of its result, `[1, T, ...]`, only from the same
    /// row of these operands. Otherwise `None`.
    pub fn read_by(&self, op: &Op, graph: &Graph) -> Option<Vec<Value>> {
        match op {
            // [1, T, heads, head_dim] to [1, T, features].
            Op::Reshape { x, shape } => {
                (self.counts_tokens(shape) && self.by_row.contains_key(x)).then(|| vec![*x])
            }
            // The result of attention, transposed to [1, T, heads, head_dim]. Before the transposition the second
            // axis is that of the heads, so a row cannot be sliced: either attention is narrowed or all rows stay.
            Op::Transpose { x, perm } if perm[..] == [0, 2, 1, 3] => {
                self.narrowable.contains(x).then(|| vec![*x])
            }
            // One of several groups of each token's features.
            Op::Take { x, index: Index::One(Int::Literal(_)), axis: 2.. } => {
                self.by_row.get(x).is_some_and(|&rank| rank > 3).then(|| vec![*x])
            }
            op => self.row_by_row(op, graph, &self.by_row),
        }
    }

    /// Returns whether a shape is `[1, T, ...]`, with the features on one or more axes.
    fn counts_tokens(&self, shape: &[Int]) -> bool {
        matches!(
            shape,
            [Int::Literal(1), Int::Value(count), features @ ..]
                if self.counts.contains(count)
                    && !features.is_empty()
                    && features.iter().all(|dim| matches!(dim, Int::Literal(_)))
        )
    }

    /// Returns whether an instruction selects the last row of a value with rows.
    pub fn is_last_row(&self, op: &Op) -> bool {
        self.last_row_of(op).is_some()
    }

    fn last_row_of(&self, op: &Op) -> Option<Value> {
        match op {
            Op::Slice {
                x,
                axis: Int::Literal(1),
                start: Int::Literal(-1),
                stop: Int::Literal(i64::MAX),
                step: 1,
            } => self.by_row.contains_key(x).then_some(*x),
            _ => None,
        }
    }

    /// Returns the operands of an instruction that are in `known`, if the instruction computes each row of its result
    /// from the same row of these operands.
    fn row_by_row(&self, op: &Op, graph: &Graph, known: &Ranks) -> Option<Vec<Value>> {
        match op {
            Op::RmsNorm { x, .. } | Op::LayerNorm { x, .. } => {
                known.contains_key(x).then(|| vec![*x])
            }
            // The axis must be one of features. Rows have at least one such axis.
            Op::Piece { x, axis, .. } => {
                (known.contains_key(x) && (*axis >= 2 || *axis == -1)).then(|| vec![*x])
            }
            Op::Slice { x, axis: Int::Literal(axis), start, stop, .. } => {
                let fixed = [start, stop].iter().all(|bound| matches!(bound, Int::Literal(_)));
                (known.contains_key(x) && fixed && (*axis >= 2 || *axis == -1)).then(|| vec![*x])
            }
            Op::Linear { x, bias, .. } => {
                let plain = bias.is_none_or(|bias| is_row_constant(graph, bias));
                (plain && known.contains_key(x)).then(|| vec![*x])
            }
            Op::QuantizedMatmul { x, w, .. } => {
                (graph.is_constant(*w) && known.contains_key(x)).then(|| vec![*x])
            }
            Op::Call { function, tensors, .. } if reduces_features(function) => {
                tensors.first().filter(|x| known.contains_key(x)).map(|x| vec![*x])
            }
            op => {
                let (rows, others): (Vec<Value>, Vec<Value>) =
                    elementwise(op)?.into_iter().partition(|x| known.contains_key(x));
                let others_have_none = others.iter().all(|&x| self.is_constant(graph, x));
                // With different ranks, broadcasting would align rows with another axis.
                let side_by_side = rows.windows(2).all(|pair| known[&pair[0]] == known[&pair[1]]);
                (!rows.is_empty() && others_have_none && side_by_side).then_some(rows)
            }
        }
    }
}

/// Returns the operands of an element-wise instruction; `None` for other instructions.
fn elementwise(op: &Op) -> Option<Vec<Value>> {
    match op {
        Op::Unary { x, .. } | Op::AsType { x, .. } => Some(vec![*x]),
        Op::Binary { a, b, .. } => Some(vec![*a, *b]),
        Op::Call { function, tensors, .. } => matches!(
            function,
            Function::BitwiseAnd
                | Function::BitwiseOr
                | Function::BitwiseXor
                | Function::Clip { .. }
                | Function::Equal
                | Function::Greater
                | Function::GreaterEqual
                | Function::Less
                | Function::LessEqual
                | Function::LogicalAnd
                | Function::LogicalNot
                | Function::LogicalOr
                | Function::NotEqual
                | Function::Round { .. }
                | Function::Where
        )
        .then(|| tensors.to_vec()),
        _ => None,
    }
}

/// Returns whether a function computes along the last axis, or reduces it and keeps it as an axis of one element.
fn reduces_features(function: &Function) -> bool {
    match function {
        Function::Max(over)
        | Function::Mean(over)
        | Function::Min(over)
        | Function::Sum(over)
        | Function::Std { over, .. }
        | Function::Var { over, .. } => {
            matches!(over, Reduction { axes, keep_dims: true } if axes[..] == [-1])
        }
        Function::Argmax(OneAxis { axis: -1, keep_dims: true }) => true,
        Function::Softmax { axis: -1, .. } => true,
        _ => false,
    }
}

fn is_matrix(graph: &Graph, value: Value) -> bool {
    graph.is_constant(value) && graph.constants[value.0 as usize].shape.len() == 2
}

/// Returns whether a value is a constant that is the same for every row.
pub fn is_row_constant(graph: &Graph, value: Value) -> bool {
    // The shapes of constants that are computed at load are not known.
    graph.is_constant(value)
        && graph.constants[value.0 as usize].shape.len() <= 1
        && !graph.init_targets.contains(&value)
}

#[cfg(test)]
mod tests;
