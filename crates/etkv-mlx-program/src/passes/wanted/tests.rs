//! Tests of the pass with programs of a few instructions.

use super::super::fixture::{as_type, assert_stays, linear, multiply, ops, tensors, unary};
use super::super::last_token::tests::{embed, graph, product, WEIGHT};
use super::*;
use crate::ir::{Affine, Norm, Unary};
use mlx_rs::Dtype;

fn block(x: u32, residual: Option<Value>) -> Op {
    let norm = Some(Norm { weight: None, eps: 1e-5, in_float32: false });
    let x = Value(x);
    Op::LinearBlock { x, weight: WEIGHT, bias: None, transposed: false, norm, gate: None, residual }
}

/// Returns the instructions after the pass, without the one that counts the tokens.
fn after(before: Vec<Op>) -> Vec<Op> {
    let mut graph = graph(before);
    leave_out_unwanted_rows(&mut graph);
    ops(&graph).split_off(1)
}

fn assert_untouched(graph: Graph) {
    assert_stays(graph, leave_out_unwanted_rows);
}

#[test]
fn rows_are_cut_before_the_product_of_the_logits() {
    // 2: embedding, 3: a layer's product, 4: logits.
    let rows = Op::WantedRows { x: Value(3) };
    assert_eq!(
        after(vec![embed(), product(2), product(3)]),
        [embed(), product(2), rows.clone(), product(5)]
    );
    assert_eq!(
        after(vec![embed(), product(2), block(3, None)]),
        [embed(), product(2), rows, block(5, None)]
    );
}

#[test]
fn what_works_element_by_element_may_come_after() {
    let mut graph =
        graph(vec![embed(), product(2), as_type(3, Dtype::Float32), unary(Unary::Tanh, 4)]);
    leave_out_unwanted_rows(&mut graph);
    assert_eq!(ops(&graph)[2], Op::WantedRows { x: Value(2) });
    assert_eq!(ops(&graph)[3], product(6));
    // A matrix differs from row to row.
    for b in [WEIGHT.0, 2] {
        assert_untouched(self::graph(vec![embed(), product(2), multiply(3, b)]));
    }
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

/// The same program with a vector instead of the matrix. The vector scales and shifts the logits.
fn scaled() -> Graph {
    let mut graph = graph(vec![embed(), linear(2, 0, Some(0)), multiply(0, 3)]);
    graph.constants[0].shape = vec![8];
    graph
}

#[test]
fn a_bias_and_a_scale_are_the_same_for_every_row() {
    let mut known = scaled();
    leave_out_unwanted_rows(&mut known);
    assert_eq!(ops(&known)[2], Op::WantedRows { x: Value(2) });
    // A value that is computed at load may have any shape.
    let mut computed = scaled();
    computed.init_targets.push(WEIGHT);
    assert_untouched(computed);
}

#[test]
fn all_rows_stay_where_others_read_them() {
    // The product that is an output is added to rows of another product.
    assert_untouched(graph(vec![embed(), block(2, Some(Value(2)))]));
    // The outputs are 4 and 3. The first is not a product: the logits are 3, and 4 reads them.
    let mut read = graph(vec![embed(), product(2), unary(Unary::Tanh, 3)]);
    read.main.outputs.push(Out::Tensor(Value(3)));
    assert_untouched(read);
    // Rows that no product computes.
    assert_untouched(graph(vec![embed()]));
}

#[test]
fn the_rows_themselves_may_be_read_by_others() {
    // Hidden states 2 are an output next to the logits 3.
    let mut both = graph(vec![embed(), product(2)]);
    both.main.outputs = tensors(&[2, 3]);
    leave_out_unwanted_rows(&mut both);
    assert_eq!(ops(&both)[2], Op::WantedRows { x: Value(2) });
    assert_eq!(both.main.outputs, tensors(&[2, 3]));
}
