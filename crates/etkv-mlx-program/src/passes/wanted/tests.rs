//! Tests of the pass with programs of a few instructions.

use super::super::last_token::tests::{embed, graph, linear, ops, WEIGHT};
use super::*;
use crate::ir::{Affine, Binary, Norm, Unary};
use mlx_rs::Dtype;

fn block(x: u32, residual: Option<Value>) -> Op {
    let norm = Some(Norm { weight: None, eps: 1e-5, in_float32: false });
    let x = Value(x);
    Op::LinearBlock { x, weight: WEIGHT, bias: None, transposed: false, norm, gate: None, residual }
}

/// Returns the instructions after the pass, without the one that counts the tokens.
fn after(ops_before: Vec<Op>) -> Vec<Op> {
    let mut graph = graph(ops_before);
    leave_out_unwanted_rows(&mut graph);
    ops(&graph).into_iter().skip(1).cloned().collect()
}

fn is_untouched(ops_before: &[Op]) -> bool {
    after(ops_before.to_vec()) == ops_before
}

#[test]
fn rows_are_cut_before_the_product_of_the_logits() {
    // 2: embedding, 3: a layer's product, 4: logits.
    let rows = Op::WantedRows { x: Value(3) };
    assert_eq!(
        after(vec![embed(), linear(2), linear(3)]),
        [embed(), linear(2), rows.clone(), linear(5)]
    );
    assert_eq!(
        after(vec![embed(), linear(2), block(3, None)]),
        [embed(), linear(2), rows, block(5, None)]
    );
}

#[test]
fn what_works_element_by_element_may_come_after() {
    let mut graph = graph(vec![
        embed(),
        linear(2),
        Op::AsType { x: Value(3), dtype: Dtype::Float32 },
        Op::Unary { function: Unary::Tanh, x: Value(4) },
    ]);
    leave_out_unwanted_rows(&mut graph);
    assert_eq!(*ops(&graph)[2], Op::WantedRows { x: Value(2) });
    assert_eq!(*ops(&graph)[3], linear(6));
    // A matrix differs from row to row.
    let by = |b| Op::Binary { function: Binary::Multiply, a: Value(3), b };
    assert!(is_untouched(&[embed(), linear(2), by(WEIGHT)]));
    assert!(is_untouched(&[embed(), linear(2), by(Value(2))]));
}

#[test]
fn packed_weights_make_logits_too() {
    let packed = |x| {
        let packing = Affine { group_size: 64, bits: 4 };
        let (x, biases) = (Value(x), Some(WEIGHT));
        Op::QuantizedMatmul { x, w: WEIGHT, scales: WEIGHT, biases, packing, transpose: true }
    };
    assert_eq!(
        after(vec![embed(), packed(2)]),
        [embed(), Op::WantedRows { x: Value(2) }, packed(4)]
    );
}

/// The same program with a vector instead of the matrix. It scales and shifts the logits.
fn scaled() -> Graph {
    let biased = Op::Linear { x: Value(2), weight: WEIGHT, bias: Some(WEIGHT), transposed: false };
    let scale = Op::Binary { function: Binary::Multiply, a: WEIGHT, b: Value(3) };
    let mut graph = graph(vec![embed(), biased, scale]);
    graph.constants[0].shape = vec![8];
    graph
}

#[test]
fn a_bias_and_a_scale_are_the_same_for_every_row() {
    let mut known = scaled();
    leave_out_unwanted_rows(&mut known);
    assert_eq!(*ops(&known)[2], Op::WantedRows { x: Value(2) });
    // A value that is computed at load may have any shape.
    let mut computed = scaled();
    computed.init_targets.push(WEIGHT);
    let before = ops(&computed).len();
    leave_out_unwanted_rows(&mut computed);
    assert_eq!(ops(&computed).len(), before);
}

#[test]
fn all_rows_stay_where_others_read_them() {
    // The product that is an output is added to rows of another product.
    assert!(is_untouched(&[embed(), block(2, Some(Value(2)))]));
    // The outputs are 4 and 3. The first is not a product: the logits are 3, and 4 reads them.
    let mut read =
        graph(vec![embed(), linear(2), Op::Unary { function: Unary::Tanh, x: Value(3) }]);
    read.main.outputs.push(Out::Tensor(Value(3)));
    let before = ops(&read).len();
    leave_out_unwanted_rows(&mut read);
    assert_eq!(ops(&read).len(), before);
    // Rows that no product computes.
    assert!(is_untouched(&[embed()]));
}

#[test]
fn the_rows_themselves_may_be_read_by_others() {
    // Hidden states 2 are an output next to the logits 3.
    let mut both = graph(vec![embed(), linear(2)]);
    both.main.outputs.insert(0, Out::Tensor(Value(2)));
    leave_out_unwanted_rows(&mut both);
    assert_eq!(*ops(&both)[2], Op::WantedRows { x: Value(2) });
    assert_eq!(both.main.outputs, [Out::Tensor(Value(2)), Out::Tensor(Value(3))]);
}
