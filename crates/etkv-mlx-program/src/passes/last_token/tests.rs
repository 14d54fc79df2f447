//! Tests of the pass with programs of a few instructions.

use super::*;
use crate::ir::{Binary, Buffer, Chain, Constant, Dim, IntValue, Unary};
use etkv::Status;
use mlx_rs::Dtype;

/// The weight, a matrix.
pub const WEIGHT: Value = Value(0);
const TOKENS: Value = Value(1);
pub const COUNT: IntValue = IntValue(0);

/// Returns a program over `[1, T]` inputs with one weight. The results of `ops` are the values 2 and up. The last one
/// is the output.
pub fn graph(ops: Vec<Op>) -> Graph {
    let shape = vec![8, 8];
    let mut instructions =
        vec![Instruction { op: Op::SymSize { x: TOKENS, dim: 1 }, out: Out::Int(COUNT) }];
    let n_values = 2 + ops.len() as u32;
    instructions.extend(
        (2..).zip(ops).map(|(value, op)| Instruction { op, out: Out::Tensor(Value(value)) }),
    );
    Graph {
        constants: vec![Constant {
            name: "weight".into(),
            shape,
            dtype: Dtype::Float32,
            joined: Vec::new(),
        }],
        inputs: vec![InputSpec::Tensor {
            value: TOKENS,
            name: "tokens".into(),
            shape: vec![Dim::Static(1), Dim::UpTo(None)],
            scalar_type: 4,
        }],
        main: Chain { instructions, outputs: vec![Out::Tensor(Value(n_values - 1))] },
        n_values,
        n_ints: 1,
        ..Graph::default()
    }
}

pub fn embed() -> Op {
    Op::Take { x: WEIGHT, index: Index::Many(TOKENS), axis: 0 }
}

pub fn linear(x: u32) -> Op {
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
        softcap: None,
        sinks: None,
        out_dtype: None,
        last_query: false,
    }
}

pub fn ops(graph: &Graph) -> Vec<&Op> {
    graph.main.instructions.iter().map(|instruction| &instruction.op).collect()
}

#[test]
fn the_last_product_runs_on_one_row() {
    // 2: embedding, 3: logits.
    let mut graph = graph(vec![embed(), linear(2)]);
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    assert_eq!(*made[2], Op::LastToken { x: Value(2) });
    assert!(matches!(made[3], Op::Linear { x: Value(4), .. }));
}

#[test]
fn rows_are_dropped_at_the_last_attention() {
    // 2: embedding, 3: attention, 4: heads transposed back, 5: merged, 6: residual, 7: logits.
    let merged = Op::Reshape {
        x: Value(4),
        shape: vec![Int::Literal(1), Int::Value(COUNT), Int::Literal(-1)],
    };
    let residual = Op::Binary { function: Binary::Add, a: Value(2), b: Value(5) };
    let heads = Op::Transpose { x: Value(3), perm: vec![0, 2, 1, 3] };
    let mut graph = graph(vec![embed(), attend(2), heads, merged, residual, linear(6)]);
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    assert!(matches!(made[2], Op::UpdateAndAttend { last_query: true, .. }));
    assert!(made
        .iter()
        .any(|op| matches!(op, Op::Reshape { shape, .. } if shape[1] == Int::Literal(1))));
    assert!(made.contains(&&Op::LastToken { x: Value(2) }), "the residual's last row");
}

#[test]
fn a_value_that_others_read_stays_whole() {
    // 2: embedding, 3: hidden, 4: attention over all of hidden, 5: sum, 6: logits.
    let sum = Op::Binary { function: Binary::Add, a: Value(3), b: Value(3) };
    let mut graph = graph(vec![embed(), linear(2), attend(3), sum, linear(5)]);
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    assert!(matches!(made[2], Op::Linear { x: Value(2), .. }), "hidden has every row");
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
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    assert!(matches!(made[2], Op::UpdateAndAttend { last_query: false, .. }));
    let cut: Vec<_> = made.iter().filter(|op| matches!(op, Op::LastToken { .. })).collect();
    assert_eq!(cut, [&&Op::LastToken { x: Value(7) }], "once tokens are the second axis");
}

fn sdpa(q: u32, causal: bool) -> Op {
    let function = Function::Sdpa { scale: 1.0, causal, mask: false, last_query: false };
    Op::Call { function, tensors: vec![Value(q), Value(4), Value(4)].into(), ints: Vec::new() }
}

/// 2: embedding, 3: split into heads, 4: heads, the keys, 5: queries, 6: attention, 7: heads back, 8: merged,
/// 9: logits.
fn attended_in_graph(queries: Op) -> Graph {
    let count = Int::Value(COUNT);
    let cut = vec![Int::Literal(1), count, Int::Literal(-1), Int::Literal(4)];
    let cut = Op::Reshape { x: Value(2), shape: cut };
    let heads = |x| Op::Transpose { x: Value(x), perm: vec![0, 2, 1, 3] };
    let merged = vec![Int::Literal(1), count, Int::Literal(-1)];
    let merged = Op::Reshape { x: Value(7), shape: merged };
    graph(vec![embed(), cut, heads(3), queries, sdpa(5, true), heads(6), merged, linear(8)])
}

fn rotated() -> Op {
    Op::Binary { function: Binary::Multiply, a: Value(4), b: Value(0) }
}

#[test]
fn rows_are_dropped_at_attention_in_the_graph() {
    let mut graph = attended_in_graph(rotated());
    graph.buffers.push(Buffer {
        name: "keys".into(),
        shape: vec![1, 2, 8, 4],
        dtype: Dtype::Float32,
        value: TOKENS,
    });
    graph.main.outputs.push(Out::Tensor(Value(4)));
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    let Op::Call { function: Function::Sdpa { last_query: true, .. }, ints, .. } = made[5] else {
        panic!("{:?}", made[5]);
    };
    assert_eq!(ints[..], [Int::Value(COUNT)]);
    assert!(matches!(made[4], Op::Binary { a: Value(4), .. }), "queries from all rows");
    let one = vec![Int::Literal(1), Int::Literal(1), Int::Literal(-1)];
    assert_eq!(*made[7], Op::Reshape { x: Value(7), shape: one });
    assert!(!made.iter().any(|op| matches!(op, Op::LastToken { .. })));
}

#[test]
fn attention_of_other_queries_stays_whole() {
    // Queries from a weight, such as learned queries, do not have one row per token.
    let queries = Op::Transpose { x: WEIGHT, perm: vec![0, 2, 1, 3] };
    let mut graph = attended_in_graph(queries);
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    let whole = |op: &&Op| matches!(op, Op::Call { function: Function::Sdpa { last_query, .. }, .. } if !last_query);
    assert!(made.iter().any(whole));
    assert!(made.contains(&&Op::LastToken { x: Value(8) }), "rows are cut once they are merged");
}

#[test]
fn lengths_before_the_logits_are_none() {
    // 2: embedding, 3: an element of the positions, 4: logits.
    let positions = Value(5);
    let element = Op::Take { x: positions, index: Index::One(Int::Literal(0)), axis: 0 };
    let program = |outputs: &[u32]| {
        let mut graph = graph(vec![embed(), element.clone(), linear(2)]);
        graph.inputs.push(InputSpec::Tensor {
            value: positions,
            name: "positions".into(),
            shape: vec![Dim::UpTo(None)],
            scalar_type: 4,
        });
        graph.n_values += 1;
        graph.main.outputs = outputs.iter().map(|&value| Out::Tensor(Value(value))).collect();
        graph
    };
    let mut lengths_first = program(&[3, 3, 4]);
    narrow(&mut lengths_first, true).unwrap();
    assert!(ops(&lengths_first).contains(&&Op::LastToken { x: Value(2) }));
    let error = narrow(&mut program(&[3]), true).unwrap_err();
    assert_eq!(error.status(), Status::Unsupported);
    assert!(error.to_string().contains("none has rows"), "{error}");
}

/// 2: embedding, 3: attention, 4: heads back, 5: merged, 6: logits.
fn attended() -> Graph {
    let heads = Op::Transpose { x: Value(3), perm: vec![0, 2, 1, 3] };
    let shape = vec![Int::Literal(1), Int::Value(COUNT), Int::Literal(-1)];
    let merged = Op::Reshape { x: Value(4), shape };
    graph(vec![embed(), attend(2), heads, merged, linear(5)])
}

#[test]
fn attention_that_is_an_output_stays_whole() {
    let mut graph = attended();
    graph.main.outputs.push(Out::Tensor(Value(3)));
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    assert!(matches!(made[2], Op::UpdateAndAttend { last_query: false, .. }));
    // The second axis of the result of attention is the axis of heads. Rows are cut once tokens are the second axis.
    assert!(!made.contains(&&Op::LastToken { x: Value(3) }));
}

#[test]
fn logits_may_come_after_hidden_states() {
    // 2: embedding, 3: hidden states, 4: logits, 5: computed from the logits.
    let other = |x| Op::Unary { function: Unary::Abs, x: Value(x) };
    let product = || graph(vec![embed(), linear(2), linear(3), other(4)]);
    for (outputs, expected) in [
        (&[4][..], (0, 4)),
        (&[3, 4], (1, 4)),
        (&[4, 3], (0, 4)),
        // A value that no product computes is not logits.
        (&[4, 5], (0, 4)),
        (&[3, 5], (1, 5)),
        (&[2, 3, 4], (2, 4)),
    ] {
        let mut graph = product();
        graph.main.outputs = outputs.iter().map(|&value| Out::Tensor(Value(value))).collect();
        let (at, value) = logits_output(&graph).unwrap();
        assert_eq!((at, value), (expected.0, Value(expected.1)), "{outputs:?}");
    }
    let mut numbers = product();
    numbers.main.outputs = vec![Out::Int(COUNT)];
    assert_eq!(logits_output(&numbers).unwrap_err().status(), Status::Unsupported);
    let mut graph = graph(vec![embed(), linear(2), linear(3)]);
    graph.main.outputs = vec![Out::Tensor(Value(3)), Out::Tensor(Value(4))];
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    assert_eq!(*made[3], Op::LastToken { x: Value(3) }, "all hidden states are computed");
}

#[test]
fn what_has_tokens_again_gives_its_last_row() {
    // 2: embedding, 3: reshaped to [T, features], 4: reshaped back to [1, T, features], 5: sum, 6: logits.
    let rows = Op::Reshape { x: Value(2), shape: vec![Int::Literal(-1), Int::Literal(8)] };
    let shape = vec![Int::Literal(1), Int::Value(COUNT), Int::Literal(8)];
    let again = Op::Reshape { x: Value(3), shape };
    let sum = Op::Binary { function: Binary::Add, a: Value(2), b: Value(4) };
    let mut graph = graph(vec![embed(), rows, again.clone(), sum, linear(5)]);
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    assert!(made.contains(&&again), "it is computed from all rows");
    for x in [2, 4] {
        assert!(made.contains(&&Op::LastToken { x: Value(x) }));
    }
}

#[test]
fn attention_is_no_logits() {
    let mut graph = graph(vec![embed(), attend(2)]);
    assert_eq!(narrow(&mut graph, true).unwrap_err().status(), Status::Unsupported);
}

#[test]
fn rows_of_other_ranks_are_not_taken_for_the_same() {
    // 2: embedding, [1, T, features]; 4: heads back, [1, T, heads, head_dim].
    for (a, b) in [(2, 4), (4, 2)] {
        let heads = Op::Transpose { x: Value(3), perm: vec![0, 2, 1, 3] };
        let sum = Op::Binary { function: Binary::Add, a: Value(a), b: Value(b) };
        let mut graph = graph(vec![embed(), attend(2), heads, sum]);
        assert_eq!(narrow(&mut graph, true).unwrap_err().status(), Status::Unsupported);
    }
}

#[test]
fn what_is_not_made_row_by_row_is_refused() {
    let mut graph = graph(vec![embed(), Op::Transpose { x: Value(2), perm: vec![1, 0, 2] }]);
    assert_eq!(narrow(&mut graph, true).unwrap_err().status(), Status::Unsupported);
}

fn last_row(x: u32) -> Op {
    Op::Slice {
        x: Value(x),
        axis: Int::Literal(1),
        start: Int::Literal(-1),
        stop: Int::Literal(i64::MAX),
        step: 1,
    }
}

#[test]
fn what_only_feeds_an_exported_last_row_is_narrowed_in_any_case() {
    // 2: embedding, 3: hidden, 4: its last row, 5: logits.
    for last_only in [false, true] {
        let mut graph = graph(vec![embed(), linear(2), last_row(3), linear(4)]);
        narrow(&mut graph, last_only).unwrap();
        let made = ops(&graph);
        assert_eq!(*made[2], Op::LastToken { x: Value(2) });
        assert!(matches!(made[3], Op::Linear { x: Value(6), .. }));
        assert_eq!(*made[4], last_row(3), "the last of one row");
        assert_eq!(*made[5], linear(4));
    }
}

#[test]
fn nothing_is_narrowed_unless_asked_for() {
    let mut graph = graph(vec![embed(), linear(2)]);
    let before = ops(&graph).into_iter().cloned().collect::<Vec<_>>();
    narrow(&mut graph, false).unwrap();
    assert_eq!(ops(&graph), before.iter().collect::<Vec<_>>());
}

#[test]
fn other_outputs_stay_whole() {
    // 2: embedding, 3: hidden, the features, 4: final, 5: logits.
    for exported_last in [false, true] {
        let (rows, logits) = if exported_last { (last_row(4), 6) } else { (linear(4), 5) };
        let mut ops = vec![embed(), linear(2), linear(3), rows];
        ops.extend(exported_last.then(|| linear(5)));
        let mut graph = graph(ops);
        graph.main.outputs = vec![Out::Tensor(Value(logits)), Out::Tensor(Value(3))];
        narrow(&mut graph, true).unwrap();
        let made = self::ops(&graph);
        assert_eq!(*made[2], linear(2), "the features have every row");
        assert_eq!(*made[3], Op::LastToken { x: Value(3) });
        assert!(matches!(made[4], Op::Linear { x, .. } if x.0 > logits));
    }
}

#[test]
fn an_output_that_is_both_is_refused() {
    let mut graph = graph(vec![embed(), linear(2)]);
    graph.main.outputs = vec![Out::Tensor(Value(3)), Out::Tensor(Value(3))];
    assert_eq!(narrow(&mut graph, true).unwrap_err().status(), Status::Unsupported);
}

#[test]
fn pieces_of_rows_are_narrowed() {
    // 2: embedding, 3: gate and up, 4 and 5: their pieces, 6: gated, 7: logits.
    let piece = |axis, start, stop| Op::Piece { x: Value(3), axis, start, stop, sizes: 8..=8 };
    let gated = Op::Binary { function: Binary::Multiply, a: Value(4), b: Value(5) };
    let program = |axis| {
        let pieces = [piece(axis, 0, 4), piece(axis, 4, 8)];
        let [first, second] = pieces;
        graph(vec![embed(), linear(2), first, second, gated.clone(), linear(6)])
    };
    let mut features = program(-1);
    narrow(&mut features, true).unwrap();
    assert_eq!(*ops(&features)[2], Op::LastToken { x: Value(2) });
    let mut tokens = program(1);
    assert_eq!(narrow(&mut tokens, true).unwrap_err().status(), Status::Unsupported);
}
