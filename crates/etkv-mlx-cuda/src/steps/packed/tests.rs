use mlx_rs::Dtype;

use super::*;
use crate::steps::recipe::{Part, Product, Recipe, Weight};
use crate::steps::testing::{attend, change_ops, is_known_only_without, program, tensor, Change};
use etkv_mlx_program::ir::{Int, IntValue, Norm, Unary};

// The constants are packed weights of three values each, a norm, the periods and a bias. The inputs follow.
const TABLE: Value = Value(0);
const HEADS: Value = Value(3);
const OUT: Value = Value(6);
const GATED: Value = Value(9);
const DOWN: Value = Value(12);
const NORM: Value = Value(15);
const PERIODS: Value = Value(16);
const BIAS: Value = Value(17);
const IDS: Value = Value(18);
const POSITIONS: Value = Value(19);
const PACKING: Affine = Affine { group_size: 32, bits: 4 };

fn packed(codes: Value) -> PackedConstants {
    let (scales, biases) = (Value(codes.0 + 1), Value(codes.0 + 2));
    PackedConstants { codes, scales, biases, packing: PACKING }
}

fn product(x: u32, codes: Value, out: u32) -> (Op, Out) {
    let PackedConstants { codes: w, scales, biases, packing } = packed(codes);
    let (x, biases) = (Value(x), Some(biases));
    tensor(Op::QuantizedMatmul { x, w, scales, biases, packing, transpose: true }, out)
}

fn norm(x: u32, out: u32) -> (Op, Out) {
    tensor(Op::RmsNorm { x: Value(x), weight: Some(NORM), eps: 1e-6 }, out)
}

fn add(a: u32, b: u32, out: u32) -> (Op, Out) {
    tensor(Op::Binary { function: Binary::Add, a: Value(a), b: Value(b) }, out)
}

/// A decoder of one layer, as the GPU passes produce it: 4 + 2 + 2 heads of 16 elements with a bias, and a
/// tied head.
fn decoder() -> Graph {
    let (perm, dtype) = (vec![0, 2, 1, 3], Dtype::Bfloat16);
    let shape = |rest: &[i64]| {
        let first = [Int::Literal(1), Int::Value(IntValue(0))];
        first.into_iter().chain(rest.iter().map(|&size| Int::Literal(size))).collect()
    };
    let take = |x: Value, out| tensor(Op::Take { x, index: Index::Many(IDS), axis: 0 }, out);
    let split = |x, axis, at: i32, n, out| {
        (Op::Split { x: Value(x), axis, at: vec![at], sizes: n..=n }, Out::Tensors(Value(out), 2))
    };
    let embeddings = Op::Dequantize {
        w: Value(20),
        scales: Value(21),
        biases: Some(Value(22)),
        packing: PACKING,
        dtype: Some(dtype),
    };
    let heads = Op::ReshapeTranspose { x: Value(26), shape: shape(&[-1, 16]), perm: perm.clone() };
    let rotary = Op::Rotary { x: Value(28), offsets: Value(30), periods: PERIODS, dtype };
    let activation = Op::Activation { function: Unary::Silu, x: Value(40), by: Some(Value(41)) };
    let made = vec![
        (Op::SymSize { x: IDS, dim: 1 }, Out::Int(IntValue(0))),
        take(TABLE, 20),
        take(Value(TABLE.0 + 1), 21),
        take(Value(TABLE.0 + 2), 22),
        tensor(embeddings, 23),
        norm(23, 24),
        product(24, HEADS, 25),
        add(25, BIAS.0, 26),
        tensor(heads, 27),
        split(27, 1, 6, 8, 28),
        tensor(Op::AsType { x: POSITIONS, dtype: Dtype::Int32 }, 30),
        tensor(rotary, 31),
        split(31, 1, 4, 6, 32),
        tensor(attend(32, 33, 29, POSITIONS), 34),
        tensor(Op::TransposeReshape { x: Value(34), perm, shape: shape(&[-1]) }, 35),
        product(35, OUT, 36),
        add(23, 36, 37),
        norm(37, 38),
        product(38, GATED, 39),
        split(39, -1, 512, 1024, 40),
        tensor(activation, 42),
        product(42, DOWN, 43),
        add(37, 43, 44),
        norm(44, 45),
        product(45, TABLE, 46),
    ];
    let shapes = (0..IDS.0).map(|index| if index < NORM.0 { vec![8, 8] } else { vec![8] });
    program(shapes.collect(), made, 46)
}

#[test]
fn a_packed_decoder_is_known_and_left_as_it_is() {
    let graph = decoder();
    let recipe = Recipe::of(&graph).unwrap();
    assert_eq!(graph.main, decoder().main);
    assert_eq!((recipe.n_buffers, recipe.logits, recipe.last_row_only), (7, 6, false));
    let [embed, heads, attend, out, gated, down, head] = &recipe.parts[..] else {
        panic!("{:?}", recipe.parts);
    };
    let packed = |codes| Weight::Packed(packed(codes));
    assert_eq!(*embed, Part::Embed { table: packed(TABLE), scale: None, out: 0 });
    let dtype = Some(Dtype::Bfloat16);
    assert_eq!(*attend, Part::Attend { layer: 0, q: 1, scale: 0.25, dtype, out: 2 });
    let norm = Some(Norm { weight: Some(NORM), eps: 1e-6, in_float32: false });
    let is = |part: &Part, expected: Product| match part {
        Part::Product(product) => assert_eq!(*product, expected),
        other => panic!("{other:?}"),
    };
    let plain = |x, codes, out| Product::plain(x, packed(codes), out);
    let Part::Product(Product { heads: Some(of_heads), .. }) = heads else {
        panic!("{heads:?}");
    };
    assert_eq!((of_heads.layer, of_heads.n_q, of_heads.n_kv), (0, 4, 2));
    let own = Some(of_heads.clone());
    is(heads, Product { bias: Some(BIAS), norm, heads: own, ..plain(0, HEADS, 1) });
    is(out, Product { residual: Some(0), ..plain(2, OUT, 3) });
    is(gated, Product { norm, gate: Some(etkv_cuda::Gate::Silu), ..plain(3, GATED, 4) });
    is(down, Product { residual: Some(3), ..plain(4, DOWN, 5) });
    is(head, Product { norm, ..plain(5, TABLE, 6) });
}

#[test]
fn a_program_may_have_plain_weights_beside_packed_ones() {
    let mut graph = decoder();
    for made in &mut graph.main.instructions {
        if let Op::Dequantize { .. } = made.op {
            made.op = Op::Take { x: NORM, index: Index::Many(IDS), axis: 0 };
        }
    }
    let recipe = Recipe::of(&graph).unwrap();
    let table = Weight::Plain { value: NORM, transposed: false };
    assert_eq!(recipe.parts[0], Part::Embed { table, scale: None, out: 0 });
    let is_packed =
        |part: &&Part| matches!(part, Part::Product(Product { weight: Weight::Packed(_), .. }));
    assert_eq!(recipe.parts.iter().filter(is_packed).count(), 5);
}

#[test]
fn other_ways_to_read_packed_weights_are_not_known() {
    let changes: &[Change] = &[
        (
            "a weight that is not transposed",
            change_ops!(Op::QuantizedMatmul { w: OUT, transpose, .. } => *transpose = false),
        ),
        (
            "scales that are computed",
            change_ops!(Op::QuantizedMatmul { w: OUT, scales, .. } => *scales = Value(35)),
        ),
        (
            "codes with two scales",
            change_ops!(
                Op::QuantizedMatmul { w: TABLE, scales, .. } => *scales = Value(OUT.0 + 1)
            ),
        ),
        (
            "codes of two packings",
            change_ops!(Op::QuantizedMatmul { w: TABLE, packing, .. } => packing.group_size = 64),
        ),
        (
            "rows of other tokens",
            change_ops!(Op::Take { x: Value(1), index, .. } => *index = Index::Many(POSITIONS)),
        ),
        (
            "rows in another dtype",
            change_ops!(Op::Dequantize { dtype, .. } => *dtype = Some(Dtype::Float32)),
        ),
        ("a sum with a matrix", |graph| graph.constants[BIAS.0 as usize].shape = vec![8, 8]),
        ("a sum that others read", |graph| graph.main.outputs.push(Out::Tensor(Value(25)))),
    ];
    is_known_only_without(decoder, changes);
}
