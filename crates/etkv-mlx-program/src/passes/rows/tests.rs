//! Tests which values are computed row by row. Such values can be narrowed to the last row.

use mlx_rs::Dtype;

use super::super::last_token::narrow;
use super::super::last_token::tests::{embed, graph, linear, ops, COUNT, WEIGHT};
use crate::ir::{
    Binary, Dim, Fill, Function, Index, InputSpec, Int, Op, RecurrentCall, RecurrentFunction,
    Reduction, Unary, Value,
};
use etkv::recurrent::Activation;
use etkv::Status;
use etkv_core::RecurrentLayer;

fn call(function: Function, tensors: &[u32]) -> Op {
    Op::Call { function, tensors: tensors.iter().map(|&x| Value(x)).collect(), ints: Vec::new() }
}

#[test]
fn a_norm_that_is_written_out_is_narrowed() {
    // 2: embedding, 3: hidden, 4: its mean, 5: centered, 6: normed, 7: logits, 8: a scale, 9: scaled logits.
    let mean = call(Function::Mean(Reduction { axes: vec![-1], keep_dims: true }), &[3]);
    let subtract = Op::Binary { function: Binary::Subtract, a: Value(3), b: Value(4) };
    let norm = Op::RmsNorm { x: Value(5), weight: None, eps: 1e-5 };
    let scale = call(Function::Full { v: Fill::Literal(0.5), dtype: Dtype::Float32 }, &[]);
    let scaled = Op::Binary { function: Binary::Multiply, a: Value(7), b: Value(8) };
    let program = |mean: Op| {
        graph(vec![
            embed(),
            linear(2),
            mean,
            subtract.clone(),
            norm.clone(),
            linear(6),
            scale.clone(),
            scaled.clone(),
        ])
    };
    let mut features = program(mean);
    narrow(&mut features, true).unwrap();
    assert_eq!(*ops(&features)[2], Op::LastToken { x: Value(2) });
    let mut tokens =
        program(call(Function::Mean(Reduction { axes: vec![1], keep_dims: true }), &[3]));
    assert_eq!(narrow(&mut tokens, true).unwrap_err().status(), Status::Unsupported);
}

#[test]
fn an_activation_of_choices_is_narrowed() {
    // 2: embedding, 3: hidden, 4: a limit, 5: its sign, 6: a condition, 7: selected, 8: logits.
    let limit = call(Function::Full { v: Fill::Literal(0.0), dtype: Dtype::Float32 }, &[]);
    let negated = Op::Unary { function: Unary::Neg, x: Value(4) };
    let mut graph = graph(vec![
        embed(),
        linear(2),
        limit,
        negated,
        call(Function::Greater, &[3, 4]),
        call(Function::Where, &[6, 3, 5]),
        linear(7),
    ]);
    narrow(&mut graph, true).unwrap();
    assert_eq!(*ops(&graph)[2], Op::LastToken { x: Value(2) });
}

#[test]
fn embeddings_of_positions_are_rows() {
    // 2: embedding, 3: positions [1, T], 4: positions plus two, 5: their embedding, 6: sum, 7: logits.
    let positions = Value(8);
    let further = call(Function::Full { v: Fill::Literal(2.0), dtype: Dtype::Int64 }, &[]);
    let mut graph = graph(vec![
        embed(),
        Op::ExpandDims { x: positions, axis: 0 },
        further,
        Op::Binary { function: Binary::Add, a: Value(3), b: Value(4) },
        Op::Take { x: WEIGHT, index: Index::Many(Value(5)), axis: 0 },
        Op::Binary { function: Binary::Add, a: Value(2), b: Value(6) },
    ]);
    graph.inputs.push(InputSpec::Tensor {
        value: positions,
        name: "positions".into(),
        shape: vec![Dim::UpTo(None)],
        scalar_type: 4,
    });
    graph.n_values += 1;
    narrow(&mut graph, true).unwrap();
    let made = ops(&graph);
    assert_eq!(*made[6], Op::LastToken { x: Value(2) });
    assert_eq!(*made[7], Op::LastToken { x: Value(6) });
}

#[test]
fn one_of_several_rows_of_a_token_is_narrowed() {
    // 2: embedding, 3: split into two, 4: the second, 5: logits.
    let count = Int::Value(COUNT);
    let shape = vec![Int::Literal(1), count, Int::Literal(2), Int::Literal(4)];
    let program = |axis| {
        let second = Op::Take { x: Value(3), index: Index::One(Int::Literal(1)), axis };
        graph(vec![embed(), Op::Reshape { x: Value(2), shape: shape.clone() }, second, linear(4)])
    };
    let mut features = program(2);
    narrow(&mut features, true).unwrap();
    assert_eq!(*ops(&features)[2], Op::LastToken { x: Value(2) });
    let mut tokens = program(1);
    assert_eq!(narrow(&mut tokens, true).unwrap_err().status(), Status::Unsupported);
}

#[test]
fn rows_after_a_convolution_are_narrowed() {
    // 2: embedding, 3: hidden, 4: its columns, 5: half of them, 6: their convolution, 7: both, 8: rows, 9: logits.
    let turn = |x| Op::Transpose { x: Value(x), perm: vec![0, 2, 1] };
    let call = RecurrentCall {
        layer: 0,
        config: RecurrentLayer::Convolution { channels: 4, width: 3 },
        function: RecurrentFunction::Convolve { activation: Activation::None },
        tensors: smallvec::smallvec![Value(5), WEIGHT],
        position: Value(1),
        out_dtype: None,
    };
    let product = |b| Op::Binary { function: Binary::Multiply, a: Value(5), b: Value(b) };
    let piece = |axis| Op::Piece { x: Value(4), axis, start: 0, stop: 4, sizes: 8..=8 };
    let program = |axis, b| {
        let layer = Op::UpdateRecurrent(Box::new(call.clone()));
        graph(vec![embed(), linear(2), turn(3), piece(axis), layer, product(b), turn(7), linear(8)])
    };
    let mut columns = program(1, 6);
    narrow(&mut columns, true).unwrap();
    assert_eq!(*ops(&columns)[8], Op::LastToken { x: Value(8) });
    assert_eq!(*ops(&columns)[7], turn(7));
    // A part of the tokens, and rows that are not tokens.
    for mut other in [program(2, 6), program(1, 3)] {
        assert_eq!(narrow(&mut other, true).unwrap_err().status(), Status::Unsupported);
    }
}
