//! Tests which values are computed row by row. Such values can be narrowed to the last row.

use mlx_rs::Dtype;

use super::super::fixture::{add, call, input, multiply, ops, reshape, rms_norm, transpose};
use super::super::fixture::{binary, expand, unary, T};
use super::super::last_token::narrow;
use super::super::last_token::tests::{assert_refused, embed, graph, product, WEIGHT};
use crate::ir::{
    Binary, Dim, Fill, Function, Index, Instruction, Int, IntValue, Op, Out, RecurrentCall,
    RecurrentFunction, Reduction, Unary, Value,
};
use etkv::recurrent::Activation;
use etkv_core::RecurrentLayer;

/// Returns a number, the same for every row.
fn full(v: f64, dtype: Dtype) -> Op {
    call(Function::Full { v: Fill::Literal(v), dtype }, &[])
}

#[test]
fn a_norm_that_is_written_out_is_narrowed() {
    // 2: embedding, 3: hidden, 4: its mean, 5: centered, 6: normed, 7: logits, 8: a scale, 9: scaled logits.
    let program = |axis| {
        graph(vec![
            embed(),
            product(2),
            call(Function::Mean(Reduction { axes: vec![axis], keep_dims: true }), &[3]),
            binary(Binary::Subtract, 3, 4),
            rms_norm(5, None, 1e-5),
            product(6),
            full(0.5, Dtype::Float32),
            multiply(7, 8),
        ])
    };
    let mut features = program(-1);
    narrow(&mut features, true).unwrap();
    assert_eq!(ops(&features)[2], Op::LastToken { x: Value(2) });
    assert_refused(program(1));
}

#[test]
fn an_activation_of_choices_is_narrowed() {
    // 2: embedding, 3: hidden, 4: a limit, 5: its sign, 6: a condition, 7: selected, 8: logits.
    let mut graph = graph(vec![
        embed(),
        product(2),
        full(0.0, Dtype::Float32),
        unary(Unary::Neg, 4),
        call(Function::Greater, &[3, 4]),
        call(Function::Where, &[6, 3, 5]),
        product(7),
    ]);
    narrow(&mut graph, true).unwrap();
    assert_eq!(ops(&graph)[2], Op::LastToken { x: Value(2) });
}

#[test]
fn embeddings_of_positions_are_rows() {
    // 2: embedding, 3: positions [1, T], 4: positions plus two, 5: their embedding, 6: sum, 7: logits.
    let mut graph = graph(vec![
        embed(),
        expand(8, 0),
        full(2.0, Dtype::Int64),
        add(3, 4),
        Op::Take { x: WEIGHT, index: Index::Many(Value(5)), axis: 0 },
        add(2, 6),
    ]);
    graph.inputs.push(input(8, &[Dim::UpTo(None)], 4));
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    assert_eq!(made[6], Op::LastToken { x: Value(2) });
    assert_eq!(made[7], Op::LastToken { x: Value(6) });
}

/// Exporters take the number of tokens from the input that they read first.
#[test]
fn tokens_are_counted_by_any_value_with_a_row_for_each() {
    // 2: embedding, 3: positions [1, T], 4: rows by the count, 5: logits.
    let counted = IntValue(7);
    let program = |x, dim| {
        let shape = vec![Int::Literal(1), Int::Value(counted), Int::Literal(8)];
        let rows = Op::Reshape { x: Value(2), shape };
        let mut graph = graph(vec![embed(), expand(8, 0), rows, product(4)]);
        graph.inputs.push(input(8, &[Dim::UpTo(None)], 4));
        let size = Instruction { op: Op::SymSize { x, dim }, out: Out::Int(counted) };
        graph.main.instructions.insert(3, size);
        graph
    };
    let (positions, embedding, expanded) = (Value(8), Value(2), Value(3));
    for (x, dim) in [
        (positions, 0),
        (positions, -1),
        (expanded, 1),
        (expanded, -1),
        (embedding, 1),
        (embedding, -2),
    ] {
        let mut narrowed = program(x, dim);
        narrow(&mut narrowed, true).unwrap();
        let reshaped = ops(&narrowed).into_iter().find_map(|op| match op {
            Op::Reshape { shape, .. } => Some(shape[1]),
            _ => None,
        });
        assert_eq!(reshaped, Some(Int::Literal(1)), "axis {dim} of {x:?}");
    }
    // Features, and the axis of the sequence.
    for (x, dim) in [(embedding, 2), (embedding, -1), (expanded, 0), (expanded, -2)] {
        assert_refused(program(x, dim));
    }
}

#[test]
fn one_of_several_rows_of_a_token_is_narrowed() {
    // 2: embedding, 3: split into two, 4: the second, 5: logits.
    let program = |axis| {
        let second = Op::Take { x: Value(3), index: Index::One(Int::Literal(1)), axis };
        graph(vec![embed(), reshape(2, &[1, T, 2, 4]), second, product(4)])
    };
    let mut features = program(2);
    narrow(&mut features, true).unwrap();
    assert_eq!(ops(&features)[2], Op::LastToken { x: Value(2) });
    assert_refused(program(1));
}

#[test]
fn rows_after_a_convolution_are_narrowed() {
    // 2: embedding, 3: hidden, 4: its columns, 5: half of them, 6: their convolution, 7: both, 8: rows, 9: logits.
    let turn = |x| transpose(x, &[0, 2, 1]);
    let call = RecurrentCall {
        layer: 0,
        config: RecurrentLayer::Convolution { channels: 4, width: 3 },
        function: RecurrentFunction::Convolve { activation: Activation::None },
        tensors: smallvec::smallvec![Value(5), WEIGHT],
        position: Value(1),
        out_dtype: None,
    };
    let piece = |axis| Op::Piece { x: Value(4), axis, start: 0, stop: 4, sizes: 8..=8 };
    let program = |axis, b| {
        let layer = Op::UpdateRecurrent(Box::new(call.clone()));
        let both = multiply(5, b);
        graph(vec![embed(), product(2), turn(3), piece(axis), layer, both, turn(7), product(8)])
    };
    let mut columns = program(1, 6);
    narrow(&mut columns, true).unwrap();
    assert_eq!(ops(&columns)[8], Op::LastToken { x: Value(8) });
    assert_eq!(ops(&columns)[7], turn(7));
    // A part of the tokens, and rows that are not tokens.
    [program(2, 6), program(1, 3)].into_iter().for_each(assert_refused);
}
