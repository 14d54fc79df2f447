//! Which values of a program are made row by row, a row for each token.

use std::collections::{HashMap, HashSet};

use crate::program::ir::{Dim, Graph, Index, InputSpec, Int, IntValue, Op, Out, Value};

/// What is known of the program's rows.
pub struct Rows {
    /// The integers that count the tokens.
    pub counts: HashSet<IntValue>,
    /// The values whose second axis is the tokens', `[1, T, ...]`.
    by_row: HashSet<Value>,
    /// The values that are made of the last row of such a value, `[1, 1, ...]`.
    pub single: HashSet<Value>,
    /// What attention makes, `[1, heads, T, head_dim]`, where one instruction
    /// alone reads it.
    attended: HashSet<Value>,
}

impl Rows {
    /// Looks through the main chain.
    pub fn find(graph: &Graph) -> Self {
        let is_tokens = |x: &Value| {
            graph.inputs.iter().any(|input| {
                matches!(input, InputSpec::Tensor { value, shape, .. }
                    if value == x && matches!(shape[..], [Dim::Static(1), Dim::UpTo(_)]))
            })
        };
        let mut n_readers = HashMap::<Value, usize>::new();
        for value in graph.main.instructions.iter().flat_map(|instruction| instruction.op.reads()) {
            *n_readers.entry(value).or_default() += 1;
        }
        let mut rows = Self {
            counts: HashSet::new(),
            by_row: HashSet::new(),
            single: HashSet::new(),
            attended: HashSet::new(),
        };
        for instruction in &graph.main.instructions {
            match (&instruction.op, instruction.out) {
                (Op::SymSize { x, dim: 1 | -1 }, Out::Int(value)) if is_tokens(x) => {
                    rows.counts.insert(value);
                }
                (Op::UpdateAndAttend { .. }, Out::Tensor(value))
                    if n_readers.get(&value) == Some(&1) =>
                {
                    rows.attended.insert(value);
                }
                (op, Out::Tensor(value)) => {
                    let embeds = match op {
                        Op::Take { x, index: Index::Many(index), axis: 0 } => {
                            is_matrix(graph, *x) && is_tokens(index)
                        }
                        Op::Dequantize { w, .. } => rows.by_row.contains(w),
                        _ => false,
                    };
                    if embeds || rows.read_by(op, graph).is_some() {
                        rows.by_row.insert(value);
                    } else if rows.is_last_row(op) || row_by_row(op, graph, &rows.single).is_some()
                    {
                        rows.single.insert(value);
                    }
                }
                _ => {}
            }
        }
        rows
    }

    /// The tensors that an instruction reads row by row, where it makes rows of
    /// its own, `[1, T, ...]`, from theirs alone. `None` where it does not.
    pub fn read_by(&self, op: &Op, graph: &Graph) -> Option<Vec<Value>> {
        match op {
            // [1, T, heads, head_dim] to [1, T, features].
            Op::Reshape { x, shape } => match shape[..] {
                [Int::Literal(1), Int::Value(count), Int::Literal(_)]
                    if self.counts.contains(&count) && self.by_row.contains(x) =>
                {
                    Some(vec![*x])
                }
                _ => None,
            },
            // What attention makes, to [1, T, heads, head_dim].
            Op::Transpose { x, perm } if perm[..] == [0, 2, 1, 3] => {
                self.attended.contains(x).then(|| vec![*x])
            }
            op => row_by_row(op, graph, &self.by_row),
        }
    }

    /// Whether an instruction takes the last row of a value with rows.
    pub fn is_last_row(&self, op: &Op) -> bool {
        matches!(op, Op::Slice {
            x,
            axis: Int::Literal(1),
            start: Int::Literal(-1),
            stop: Int::Literal(i64::MAX),
            step: 1,
        } if self.by_row.contains(x))
    }
}

/// The tensors of the set `known` that an instruction reads, where each row that it
/// makes is made of the same row of theirs.
fn row_by_row(op: &Op, graph: &Graph, known: &HashSet<Value>) -> Option<Vec<Value>> {
    match op {
        Op::Unary { x, .. }
        | Op::AsType { x, .. }
        | Op::RmsNorm { x, .. }
        | Op::LayerNorm { x, .. } => known.contains(x).then(|| vec![*x]),
        // Along an axis of features: the rows have one at least.
        Op::Piece { x, axis, .. } => {
            (known.contains(x) && (*axis >= 2 || *axis == -1)).then(|| vec![*x])
        }
        Op::Slice { x, axis: Int::Literal(axis), start, stop, .. } => {
            let fixed = [start, stop].iter().all(|bound| matches!(bound, Int::Literal(_)));
            (known.contains(x) && fixed && (*axis >= 2 || *axis == -1)).then(|| vec![*x])
        }
        Op::Binary { a, b, .. } => {
            let (rows, others): (Vec<Value>, Vec<Value>) =
                [*a, *b].iter().partition(|x| known.contains(x));
            let others_have_none = others.iter().all(|&value| is_row_constant(graph, value));
            (!rows.is_empty() && others_have_none).then_some(rows)
        }
        Op::Linear { x, bias, .. } => {
            let plain = bias.is_none_or(|bias| is_row_constant(graph, bias));
            (plain && known.contains(x)).then(|| vec![*x])
        }
        Op::QuantizedMatmul { x, w, .. } => {
            (graph.is_constant(*w) && known.contains(x)).then(|| vec![*x])
        }
        _ => None,
    }
}

fn is_matrix(graph: &Graph, value: Value) -> bool {
    graph.is_constant(value) && graph.constants[value.0 as usize].shape.len() == 2
}

fn is_row_constant(graph: &Graph, value: Value) -> bool {
    graph.is_constant(value) && graph.constants[value.0 as usize].shape.len() <= 1
}
