//! Narrows a program to the last token's row of its output.
//!
//! A prompt's rows matter through the cache alone: of its logits one row is
//! read. The output's last product, which is the widest of all, then runs on one
//! row, and so does everything that works row by row before it, up to the last
//! layer's attention.

use std::collections::{HashMap, HashSet};

use super::{insert, makers};
use crate::error::{fail, Result};
use crate::program::ir::{
    Dim, Graph, Index, InputSpec, Instruction, Int, IntValue, Op, Out, Value,
};

/// Narrows the one output of `graph`, `[1, T, ...]`, to `[1, 1, ...]`.
///
/// # Errors
/// [`Unsupported`](crate::Status::Unsupported) where the program has other
/// outputs, or where its output is not made row by row.
pub fn narrow(graph: &mut Graph) -> Result<()> {
    let [Out::Tensor(output)] = graph.main.outputs[..] else {
        fail!(
            Unsupported,
            "logits of the last token only: the program has {} outputs, this works with one \
             tensor",
            graph.main.outputs.len()
        );
    };
    let rows = Rows::find(graph);
    let narrow = narrowed(graph, output, &rows);
    if !narrow.contains(&output) {
        fail!(Unsupported, "logits of the last token only: the output is not made row by row");
    }
    rewrite(graph, &narrow, &rows);
    Ok(())
}

/// What is known of the program's rows.
struct Rows {
    /// The integers that count the tokens.
    counts: HashSet<IntValue>,
    /// The values whose second axis is the tokens', `[1, T, ...]`.
    by_row: HashSet<Value>,
    /// What attention makes, `[1, heads, T, head_dim]`, where one instruction
    /// alone reads it.
    attended: HashSet<Value>,
}

impl Rows {
    fn find(graph: &Graph) -> Self {
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
        let mut rows =
            Self { counts: HashSet::new(), by_row: HashSet::new(), attended: HashSet::new() };
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
                            graph.is_constant(*x) && is_tokens(index)
                        }
                        Op::Dequantize { w, .. } => rows.by_row.contains(w),
                        _ => false,
                    };
                    if embeds || rows.read_by(op, graph).is_some() {
                        rows.by_row.insert(value);
                    }
                }
                _ => {}
            }
        }
        rows
    }

    /// The tensors that an instruction reads row by row, where it makes rows of
    /// its own, `[1, T, ...]`, from theirs alone. `None` where it does not.
    fn read_by(&self, op: &Op, graph: &Graph) -> Option<Vec<Value>> {
        let by_row = |value: &Value| self.by_row.contains(value);
        match op {
            Op::Unary { x, .. } | Op::AsType { x, .. } | Op::RmsNorm { x, .. } => {
                by_row(x).then(|| vec![*x])
            }
            Op::Binary { a, b, .. } => {
                let (rows, others): (Vec<Value>, Vec<Value>) =
                    [*a, *b].iter().partition(|x| by_row(x));
                let others_have_none = others.iter().all(|&value| is_row_constant(graph, value));
                (!rows.is_empty() && others_have_none).then_some(rows)
            }
            Op::Linear { x, bias, .. } => {
                let plain = bias.is_none_or(|bias| is_row_constant(graph, bias));
                (plain && by_row(x)).then(|| vec![*x])
            }
            Op::QuantizedMatmul { x, w, .. } => {
                (graph.is_constant(*w) && by_row(x)).then(|| vec![*x])
            }
            // [1, T, heads, head_dim] to [1, T, features].
            Op::Reshape { x, shape } => match shape[..] {
                [Int::Literal(1), Int::Value(count), Int::Literal(_)]
                    if self.counts.contains(&count) && by_row(x) =>
                {
                    Some(vec![*x])
                }
                _ => None,
            },
            // What attention makes, to [1, T, heads, head_dim].
            Op::Transpose { x, perm } if perm[..] == [0, 2, 1, 3] => {
                self.attended.contains(x).then(|| vec![*x])
            }
            _ => None,
        }
    }
}

fn is_row_constant(graph: &Graph, value: Value) -> bool {
    graph.is_constant(value) && graph.constants[value.0 as usize].shape.len() <= 1
}

/// The values of which only the last row is ever wanted: from the output up, as
/// long as all readers are narrowed themselves.
fn narrowed(graph: &Graph, output: Value, rows: &Rows) -> HashSet<Value> {
    let mut readers = HashMap::<Value, Vec<usize>>::new();
    for (index, instruction) in graph.main.instructions.iter().enumerate() {
        for value in instruction.op.reads() {
            readers.entry(value).or_default().push(index);
        }
    }
    let made = makers(graph);
    let mut narrow = HashSet::new();
    // Backwards, each value after all of its readers.
    for (index, instruction) in graph.main.instructions.iter().enumerate().rev() {
        let Out::Tensor(value) = instruction.out else { continue };
        if made.get(&value) != Some(&index) {
            continue;
        }
        let wanted = if value == output {
            !readers.contains_key(&value)
        } else {
            readers.get(&value).is_some_and(|readers| {
                readers.iter().all(|&reader| {
                    let reader = &graph.main.instructions[reader];
                    let narrowed = matches!(reader.out, Out::Tensor(out) if narrow.contains(&out));
                    narrowed
                        && rows.read_by(&reader.op, graph).is_some_and(|read| read.contains(&value))
                })
            })
        };
        if !wanted {
            continue;
        }
        if matches!(instruction.op, Op::UpdateAndAttend { .. })
            || rows.read_by(&instruction.op, graph).is_some()
        {
            narrow.insert(value);
        }
    }
    narrow
}

/// Makes the narrowed values narrow: attention answers its last query only, and
/// what else enters from wide values passes through `LastToken`.
fn rewrite(graph: &mut Graph, narrow: &HashSet<Value>, rows: &Rows) {
    let mut inserted: Vec<(usize, Instruction)> = Vec::new();
    let mut last_rows = HashMap::<Value, Value>::new();
    for index in 0..graph.main.instructions.len() {
        let instruction = graph.main.instructions[index].clone();
        if !matches!(instruction.out, Out::Tensor(value) if narrow.contains(&value)) {
            continue;
        }
        let mut op = instruction.op;
        if let Op::UpdateAndAttend { last_query, .. } = &mut op {
            *last_query = true;
            graph.main.instructions[index].op = op;
            continue;
        }
        let read = rows.read_by(&op, graph).unwrap_or_default();
        for wide in read.into_iter().filter(|value| !narrow.contains(value)) {
            let row = *last_rows.entry(wide).or_insert_with(|| {
                let row = graph.new_value();
                let op = Op::LastToken { x: wide };
                inserted.push((index, Instruction { op, out: Out::Tensor(row) }));
                row
            });
            op.for_each_read(|value| {
                if *value == wide {
                    *value = row;
                }
            });
        }
        if let Op::Reshape { shape, .. } = &mut op {
            for dim in shape {
                if matches!(dim, Int::Value(count) if rows.counts.contains(count)) {
                    *dim = Int::Literal(1);
                }
            }
        }
        graph.main.instructions[index].op = op;
    }
    insert(graph, inserted);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::ir::{Binary, Chain, Constant};
    use crate::Status;
    use mlx_rs::Dtype;

    const WEIGHT: Value = Value(0);
    const TOKENS: Value = Value(1);
    const COUNT: IntValue = IntValue(0);

    /// A program over `[1, T]` inputs with one weight; values from 2 on are made
    /// by `ops`, the last of them its output.
    fn graph(ops: Vec<Op>) -> Graph {
        let shape = vec![8, 8];
        let mut instructions =
            vec![Instruction { op: Op::SymSize { x: TOKENS, dim: 1 }, out: Out::Int(COUNT) }];
        let n_values = 2 + ops.len() as u32;
        instructions.extend(
            (2..).zip(ops).map(|(value, op)| Instruction { op, out: Out::Tensor(Value(value)) }),
        );
        Graph {
            constants: vec![Constant { name: "weight".into(), shape, dtype: Dtype::Float32 }],
            inputs: vec![InputSpec::Tensor {
                value: TOKENS,
                name: "tokens".into(),
                shape: vec![Dim::Static(1), Dim::UpTo(None)],
                scalar_type: 4,
            }],
            init: Chain::default(),
            init_targets: Vec::new(),
            main: Chain { instructions, outputs: vec![Out::Tensor(Value(n_values - 1))] },
            n_values,
            n_ints: 1,
        }
    }

    fn embed() -> Op {
        Op::Take { x: WEIGHT, index: Index::Many(TOKENS), axis: 0 }
    }

    fn linear(x: u32) -> Op {
        Op::Linear { x: Value(x), weight: WEIGHT, bias: None, transposed: false }
    }

    fn attend(q: u32) -> Op {
        Op::UpdateAndAttend {
            q: Value(q),
            k: Value(q),
            v: Value(q),
            position: TOKENS,
            layer: 0,
            scale: 1.0,
            out_dtype: None,
            last_query: false,
        }
    }

    fn ops(graph: &Graph) -> Vec<&Op> {
        graph.main.instructions.iter().map(|instruction| &instruction.op).collect()
    }

    #[test]
    fn the_last_product_runs_on_one_row() {
        // 2: embedding, 3: logits.
        let mut graph = graph(vec![embed(), linear(2)]);
        narrow(&mut graph).unwrap();
        let made = ops(&graph);
        assert_eq!(*made[2], Op::LastToken { x: Value(2) });
        assert!(matches!(made[3], Op::Linear { x: Value(4), .. }));
    }

    #[test]
    fn rows_are_dropped_at_the_last_attention() {
        // 2: embedding, 3: attention, 4: heads back, 5: merged, 6: residual, 7: logits.
        let merged = Op::Reshape {
            x: Value(4),
            shape: vec![Int::Literal(1), Int::Value(COUNT), Int::Literal(-1)],
        };
        let residual = Op::Binary { function: Binary::Add, a: Value(2), b: Value(5) };
        let heads = Op::Transpose { x: Value(3), perm: vec![0, 2, 1, 3] };
        let mut graph = graph(vec![embed(), attend(2), heads, merged, residual, linear(6)]);
        narrow(&mut graph).unwrap();
        let made = ops(&graph);
        assert!(matches!(made[2], Op::UpdateAndAttend { last_query: true, .. }));
        assert!(made
            .iter()
            .any(|op| matches!(op, Op::Reshape { shape, .. } if shape[1] == Int::Literal(1))));
        assert!(
            made.contains(&&Op::LastToken { x: Value(2) }),
            "the residual enters by its last row"
        );
    }

    #[test]
    fn a_value_that_others_read_stays_whole() {
        // 2: embedding, 3: hidden, 4: attention over all of hidden, 5: sum, 6: logits.
        let sum = Op::Binary { function: Binary::Add, a: Value(3), b: Value(3) };
        let mut graph = graph(vec![embed(), linear(2), attend(3), sum, linear(5)]);
        narrow(&mut graph).unwrap();
        let made = ops(&graph);
        assert!(matches!(made[2], Op::Linear { x: Value(2), .. }), "hidden is made for every row");
        assert!(matches!(made[3], Op::UpdateAndAttend { last_query: false, .. }));
    }

    #[test]
    fn a_gate_on_the_heads_is_not_cut_along_the_wrong_axis() {
        // 2: embedding, 3: attention, 4: gate, 5: gated, 6: heads back, 7: merged, 8: logits.
        let gate = Op::Transpose { x: Value(2), perm: vec![0, 2, 1, 3] };
        let gated = Op::Binary { function: Binary::Multiply, a: Value(3), b: Value(4) };
        let heads = Op::Transpose { x: Value(5), perm: vec![0, 2, 1, 3] };
        let shape = vec![Int::Literal(1), Int::Value(COUNT), Int::Literal(-1)];
        let merged = Op::Reshape { x: Value(6), shape };
        let mut graph = graph(vec![embed(), attend(2), gate, gated, heads, merged, linear(7)]);
        assert_eq!(narrow(&mut graph).unwrap_err().status(), Status::Unsupported);
    }

    #[test]
    fn what_is_not_made_row_by_row_is_refused() {
        let mut graph = graph(vec![embed(), Op::Transpose { x: Value(2), perm: vec![1, 0, 2] }]);
        assert_eq!(narrow(&mut graph).unwrap_err().status(), Status::Unsupported);
    }
}
