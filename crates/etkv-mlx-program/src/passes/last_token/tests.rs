//! Tests of the pass with programs of a few instructions.

use super::super::fixture::{
    self, add, attend, call, constant, input, linear, multiply, numbered, ops, reshape, tensors,
    transpose, unary, COUNT, T,
};
use super::*;
use crate::ir::{Buffer, Dim, Unary};
use etkv::Status;
use mlx_rs::Dtype;

/// The weight, a matrix.
pub const WEIGHT: Value = Value(0);
const TOKENS: Value = Value(1);

/// Returns a program over `[1, T]` inputs with one weight. The results of `ops` are the values 2 and up. The last one
/// is the output.
pub fn graph(ops: Vec<Op>) -> Graph {
    let count = (Op::SymSize { x: TOKENS, dim: 1 }, Out::Int(COUNT));
    Graph {
        constants: vec![constant("weight", &[8, 8])],
        inputs: vec![input(TOKENS.0, &[Dim::Static(1), Dim::UpTo(None)], 4)],
        ..fixture::graph(std::iter::once(count).chain(numbered(2, ops)))
    }
}

pub fn embed() -> Op {
    Op::Take { x: WEIGHT, index: Index::Many(TOKENS), axis: 0 }
}

/// Returns the product of `x` and the weight.
pub fn product(x: u32) -> Op {
    linear(x, WEIGHT.0, None)
}

/// Returns attention over the rows of `x`.
fn attention(x: u32) -> Op {
    attend([x; 3], TOKENS.0)
}

/// Returns a transposition of the axes of tokens and heads.
fn turned(x: u32) -> Op {
    transpose(x, &[0, 2, 1, 3])
}

fn merged(x: u32) -> Op {
    reshape(x, &[1, T, -1])
}

/// Asserts that a program cannot return only the last row.
pub fn assert_refused(mut graph: Graph) {
    assert_eq!(narrow(&mut graph, true).unwrap_err().status(), Status::Unsupported);
}

#[test]
fn the_last_product_runs_on_one_row() {
    // 2: embedding, 3: logits.
    let mut graph = graph(vec![embed(), product(2)]);
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    assert_eq!(made[2], Op::LastToken { x: Value(2) });
    assert!(matches!(made[3], Op::Linear { x: Value(4), .. }));
}

#[test]
fn rows_are_dropped_at_the_last_attention() {
    // 2: embedding, 3: attention, 4: heads transposed back, 5: merged, 6: residual, 7: logits.
    let mut graph = graph(vec![embed(), attention(2), turned(3), merged(4), add(2, 5), product(6)]);
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    assert!(matches!(made[2], Op::UpdateAndAttend { last_query: true, .. }));
    assert!(made
        .iter()
        .any(|op| matches!(op, Op::Reshape { shape, .. } if shape[1] == Int::Literal(1))));
    assert!(made.contains(&Op::LastToken { x: Value(2) }), "the residual's last row");
}

#[test]
fn a_value_that_others_read_stays_whole() {
    // 2: embedding, 3: hidden, 4: attention over all of hidden, 5: sum, 6: logits.
    let mut graph = graph(vec![embed(), product(2), attention(3), add(3, 3), product(5)]);
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    assert!(matches!(made[2], Op::Linear { x: Value(2), .. }), "hidden has every row");
    assert!(matches!(made[3], Op::UpdateAndAttend { last_query: false, .. }));
}

#[test]
fn a_gate_on_the_heads_is_not_cut_along_the_wrong_axis() {
    // 2: embedding, 3: attention, 4: gate, 5: gated, 6: heads back, 7: merged, 8: logits.
    let (gate, gated) = (turned(2), multiply(3, 4));
    let mut graph =
        graph(vec![embed(), attention(2), gate, gated, turned(5), merged(6), product(7)]);
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    assert!(matches!(made[2], Op::UpdateAndAttend { last_query: false, .. }));
    let cut: Vec<_> = made.iter().filter(|op| matches!(op, Op::LastToken { .. })).collect();
    assert_eq!(cut, [&Op::LastToken { x: Value(7) }], "once tokens are the second axis");
}

fn sdpa(q: u32, causal: bool) -> Op {
    let function = Function::Sdpa { scale: 1.0, causal, mask: false, last_query: false };
    call(function, &[q, 4, 4])
}

/// 2: embedding, 3: split into heads, 4: heads, the keys, 5: queries, 6: attention, 7: heads back, 8: merged,
/// 9: logits.
fn attended_in_graph(queries: Op) -> Graph {
    let (cut, attended) = (reshape(2, &[1, T, -1, 4]), sdpa(5, true));
    graph(vec![embed(), cut, turned(3), queries, attended, turned(6), merged(7), product(8)])
}

#[test]
fn rows_are_dropped_at_attention_in_the_graph() {
    let mut graph = attended_in_graph(multiply(4, 0));
    graph.buffers.push(Buffer {
        name: "keys".into(),
        shape: vec![1, 2, 8, 4],
        dtype: Dtype::Float32,
        value: TOKENS,
    });
    graph.main.outputs.push(Out::Tensor(Value(4)));
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    let Op::Call { function: Function::Sdpa { last_query: true, .. }, ints, .. } = &made[5] else {
        panic!("{:?}", made[5]);
    };
    assert_eq!(ints[..], [Int::Value(COUNT)]);
    assert!(matches!(made[4], Op::Binary { a: Value(4), .. }), "queries from all rows");
    assert_eq!(made[7], reshape(7, &[1, 1, -1]));
    assert!(!made.iter().any(|op| matches!(op, Op::LastToken { .. })));
}

#[test]
fn attention_of_other_queries_stays_whole() {
    // Queries from a weight, such as learned queries, do not have one row per token.
    let mut graph = attended_in_graph(turned(WEIGHT.0));
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    let whole = |op: &Op| matches!(op, Op::Call { function: Function::Sdpa { last_query, .. }, .. } if !last_query);
    assert!(made.iter().any(whole));
    assert!(made.contains(&Op::LastToken { x: Value(8) }), "rows are cut once they are merged");
}

#[test]
fn lengths_before_the_logits_are_none() {
    // 2: embedding, 3: an element of the positions, 4: logits.
    let positions = Value(5);
    let element = Op::Take { x: positions, index: Index::One(Int::Literal(0)), axis: 0 };
    let program = |outputs: &[u32]| {
        let mut graph = graph(vec![embed(), element.clone(), product(2)]);
        graph.inputs.push(input(positions.0, &[Dim::UpTo(None)], 4));
        graph.main.outputs = tensors(outputs);
        graph
    };
    let mut lengths_first = program(&[3, 3, 4]);
    narrow(&mut lengths_first, true).unwrap();
    assert!(ops(&lengths_first).contains(&Op::LastToken { x: Value(2) }));
    let error = narrow(&mut program(&[3]), true).unwrap_err();
    assert_eq!(error.status(), Status::Unsupported);
    assert!(error.to_string().contains("none has rows"), "{error}");
}

/// 2: embedding, 3: attention, 4: heads back, 5: merged, 6: logits.
fn attended() -> Graph {
    graph(vec![embed(), attention(2), turned(3), merged(4), product(5)])
}

#[test]
fn attention_that_is_an_output_stays_whole() {
    let mut graph = attended();
    graph.main.outputs.push(Out::Tensor(Value(3)));
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    assert!(matches!(made[2], Op::UpdateAndAttend { last_query: false, .. }));
    // The second axis of the result of attention is the axis of heads. Rows are cut once tokens are the second axis.
    assert!(!made.contains(&Op::LastToken { x: Value(3) }));
}

#[test]
fn logits_may_come_after_hidden_states() {
    // 2: embedding, 3: hidden states, 4: logits, 5: computed from the logits.
    let all = || graph(vec![embed(), product(2), product(3), unary(Unary::Abs, 4)]);
    for (outputs, expected) in [
        (&[4][..], (0, 4)),
        (&[3, 4], (1, 4)),
        (&[4, 3], (0, 4)),
        // A value that no product computes is not logits.
        (&[4, 5], (0, 4)),
        (&[3, 5], (1, 5)),
        (&[2, 3, 4], (2, 4)),
    ] {
        let mut graph = all();
        graph.main.outputs = tensors(outputs);
        let (at, value) = logits_output(&graph).unwrap();
        assert_eq!((at, value), (expected.0, Value(expected.1)), "{outputs:?}");
    }
    let mut numbers = all();
    numbers.main.outputs = vec![Out::Int(COUNT)];
    assert_eq!(logits_output(&numbers).unwrap_err().status(), Status::Unsupported);
    let mut graph = graph(vec![embed(), product(2), product(3)]);
    graph.main.outputs = tensors(&[3, 4]);
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    assert_eq!(made[3], Op::LastToken { x: Value(3) }, "all hidden states are computed");
}

#[test]
fn what_has_tokens_again_gives_its_last_row() {
    // 2: embedding, 3: reshaped to [T, features], 4: reshaped back to [1, T, features], 5: sum, 6: logits.
    let (rows, again) = (reshape(2, &[-1, 8]), reshape(3, &[1, T, 8]));
    let mut graph = graph(vec![embed(), rows, again.clone(), add(2, 4), product(5)]);
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    assert!(made.contains(&again), "it is computed from all rows");
    for x in [2, 4] {
        assert!(made.contains(&Op::LastToken { x: Value(x) }));
    }
}

#[test]
fn attention_is_no_logits() {
    assert_refused(graph(vec![embed(), attention(2)]));
}

#[test]
fn rows_of_other_ranks_are_not_taken_for_the_same() {
    // 2: embedding, [1, T, features]; 4: heads back, [1, T, heads, head_dim].
    for (a, b) in [(2, 4), (4, 2)] {
        assert_refused(graph(vec![embed(), attention(2), turned(3), add(a, b)]));
    }
}

#[test]
fn what_is_not_made_row_by_row_is_refused() {
    assert_refused(graph(vec![embed(), transpose(2, &[1, 0, 2])]));
}

fn last_row(x: u32) -> Op {
    fixture::slice(x, 1, -1, i64::MAX)
}

#[test]
fn what_only_feeds_an_exported_last_row_is_narrowed_in_any_case() {
    // 2: embedding, 3: hidden, 4: its last row, 5: logits.
    for last_only in [false, true] {
        let mut graph = graph(vec![embed(), product(2), last_row(3), product(4)]);
        narrow(&mut graph, last_only).unwrap();
        let made = ops(&graph);
        assert_eq!(made[2], Op::LastToken { x: Value(2) });
        assert!(matches!(made[3], Op::Linear { x: Value(6), .. }));
        assert_eq!(made[4], last_row(3), "the last of one row");
        assert_eq!(made[5], product(4));
    }
}

#[test]
fn nothing_is_narrowed_unless_asked_for() {
    let mut graph = graph(vec![embed(), product(2)]);
    let before = ops(&graph);
    narrow(&mut graph, false).unwrap();
    assert_eq!(ops(&graph), before);
}

#[test]
fn other_outputs_stay_whole() {
    // 2: embedding, 3: hidden, the features, 4: final, 5: logits.
    for exported_last in [false, true] {
        let (rows, logits) = if exported_last { (last_row(4), 6) } else { (product(4), 5) };
        let mut ops = vec![embed(), product(2), product(3), rows];
        ops.extend(exported_last.then(|| product(5)));
        let mut graph = graph(ops);
        graph.main.outputs = tensors(&[logits, 3]);
        narrow(&mut graph, true).unwrap();
        let made = self::ops(&graph);
        assert_eq!(made[2], product(2), "the features have every row");
        assert_eq!(made[3], Op::LastToken { x: Value(3) });
        assert!(matches!(made[4], Op::Linear { x, .. } if x.0 > logits));
    }
}

#[test]
fn an_output_that_is_both_is_refused() {
    let mut graph = graph(vec![embed(), product(2)]);
    graph.main.outputs = tensors(&[3, 3]);
    assert_refused(graph);
}

#[test]
fn pieces_of_rows_are_narrowed() {
    // 2: embedding, 3: gate and up, 4 and 5: their pieces, 6: gated, 7: logits.
    let piece = |axis, start, stop| Op::Piece { x: Value(3), axis, start, stop, sizes: 8..=8 };
    let program = |axis| {
        let [first, second] = [piece(axis, 0, 4), piece(axis, 4, 8)];
        graph(vec![embed(), product(2), first, second, multiply(4, 5), product(6)])
    };
    let mut features = program(-1);
    narrow(&mut features, true).unwrap();
    assert_eq!(ops(&features)[2], Op::LastToken { x: Value(2) });
    assert_refused(program(1));
}
