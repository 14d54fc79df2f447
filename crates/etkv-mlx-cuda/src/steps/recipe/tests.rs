use super::*;
use crate::steps::testing::{
    attend, change_ops, is_known_only_without, made, program, tensor, Change,
};
use etkv_mlx_program::ir::{Binary, Heads, Instruction, Int, IntValue};

// The constants, followed by the inputs.
const TABLE: Value = Value(0);
const NORM: Value = Value(1);
const HEADS: Value = Value(2);
const OUT: Value = Value(3);
const GATED: Value = Value(4);
const DOWN: Value = Value(5);
const PERIODS: Value = Value(6);
const IDS: Value = Value(7);
const POSITIONS: Value = Value(8);

/// A decoder of one layer: 4 + 2 + 2 heads of 16.
fn decoder() -> Graph {
    let norm = Some(Norm { weight: Some(NORM), eps: 1e-6, in_float32: false });
    let heads = Heads {
        tokens: Int::Value(IntValue(0)),
        head_dim: 16,
        n: 8,
        at: vec![4, 6],
        rotated: 6,
        offsets: Value(10),
        periods: PERIODS,
        dtype: Dtype::Bfloat16,
    };
    let (bias, transposed) = (None, true);
    let shape = vec![Int::Literal(1), Int::Value(IntValue(0)), Int::Literal(-1)];
    let block = |x: u32, weight, norm, gate, residual| Op::LinearBlock {
        x: Value(x),
        weight,
        bias,
        transposed,
        norm,
        gate,
        residual,
    };
    let gate = Some(Unary::Silu);
    let (x, perm) = (Value(14), vec![0, 2, 1, 3]);
    let made = vec![
        (Op::SymSize { x: IDS, dim: 1 }, Out::Int(IntValue(0))),
        tensor(Op::Take { x: TABLE, index: Index::Many(IDS), axis: 0 }, 9),
        tensor(Op::AsType { x: POSITIONS, dtype: Dtype::Int32 }, 10),
        (
            Op::LinearHeads { x: Value(9), weight: HEADS, bias, transposed, norm, heads },
            Out::Tensors(Value(11), 3),
        ),
        tensor(attend(11, 12, 13, POSITIONS), 14),
        tensor(Op::TransposeReshape { x, perm, shape }, 15),
        tensor(block(15, OUT, None, None, Some(Value(9))), 16),
        tensor(block(16, GATED, norm, gate, None), 17),
        tensor(block(17, DOWN, None, None, Some(Value(16))), 18),
        tensor(block(18, TABLE, norm, None, None), 19),
    ];
    program(vec![Vec::new(); 7], made, 19)
}

#[test]
fn a_decoder_is_known() {
    let recipe = Recipe::of(&decoder()).unwrap();
    assert_eq!((recipe.n_buffers, recipe.logits, recipe.last_row_only), (7, 6, false));
    let [embed, heads, attend, out, gated, down, head] = &recipe.parts[..] else {
        panic!("{:?}", recipe.parts);
    };
    let plain = |value, transposed| Weight::Plain { value, transposed };
    assert_eq!(*embed, Part::Embed { table: plain(TABLE, false), scale: None, out: 0 });
    let dtype = Some(Dtype::Bfloat16);
    assert_eq!(*attend, Part::Attend { layer: 0, q: 1, scale: 0.25, dtype, out: 2 });
    let products = [heads, out, gated, down, head].map(|part| match part {
        Part::Product(product) => {
            let layer = product.heads.as_ref().map(|heads| heads.layer);
            (product.x, product.weight, product.gate, product.residual, layer, product.out)
        }
        other => panic!("{other:?}"),
    });
    assert_eq!(
        products,
        [
            (0, plain(HEADS, true), None, None, Some(0), 1),
            (2, plain(OUT, true), None, Some(0), None, 3),
            (3, plain(GATED, true), Some(Gate::Silu), None, None, 4),
            (4, plain(DOWN, true), None, Some(3), None, 5),
            (5, plain(TABLE, true), None, None, None, 6),
        ]
    );
}

#[test]
fn the_last_row_alone_is_told() {
    for change in [
        change_ops!(Op::UpdateAndAttend { last_query, .. } => *last_query = true),
        |graph: &mut Graph| {
            graph.main.instructions.insert(9, made(Op::LastToken { x: Value(18) }, 18))
        },
    ] {
        let mut graph = decoder();
        change(&mut graph);
        assert!(Recipe::of(&graph).unwrap().last_row_only);
    }
}

#[test]
fn what_is_not_known_is_left_to_the_interpreter() {
    let changes: &[Change] = &[
        ("another op", |graph| {
            let op = Op::Unary { function: Unary::Tanh, x: Value(19) };
            graph.main.instructions.push(made(op, 19));
        }),
        (
            "another gate",
            change_ops!(Op::LinearBlock { weight: GATED, gate, .. } => *gate = Some(Unary::Tanh)),
        ),
        (
            "a weight that is computed",
            change_ops!(Op::LinearBlock { weight: weight @ OUT, .. } => *weight = Value(9)),
        ),
        (
            "ids that are computed",
            change_ops!(Op::Take { index, .. } => *index = Index::Many(Value(10))),
        ),
        (
            "heads at other positions",
            change_ops!(Op::LinearHeads { heads, .. } => heads.offsets = IDS),
        ),
        (
            "attention at other positions",
            change_ops!(Op::UpdateAndAttend { position, .. } => *position = IDS),
        ),
        (
            "attention with a softcap",
            change_ops!(Op::UpdateAndAttend { softcap, .. } => *softcap = Some(50.0)),
        ),
        (
            "attention with sinks",
            change_ops!(Op::UpdateAndAttend { sinks, .. } => *sinks = Some(NORM)),
        ),
        (
            "keys in the place of values",
            change_ops!(Op::UpdateAndAttend { v, .. } => *v = Value(12)),
        ),
        ("values that rotate", change_ops!(Op::LinearHeads { heads, .. } => heads.rotated = 8)),
        ("keys that others read", |graph| {
            graph.main.instructions.push(made(Op::ExpandDims { x: Value(12), axis: 0 }, 19));
        }),
        ("an output that is a constant", |graph| graph.main.outputs.push(Out::Tensor(NORM))),
        ("the same output twice", |graph| graph.main.outputs.push(Out::Tensor(Value(19)))),
        ("no attention", |graph| {
            graph.main.outputs = vec![Out::Tensor(Value(9))];
            graph.main.instructions.truncate(2);
        }),
    ];
    is_known_only_without(decoder, changes);
}

/// The decoder with separate instructions for the heads of its layer. The instructions `replaced` begin with
/// the product, and end with the queries, keys and values that attention reads.
fn separate_heads(replaced: Vec<(Op, Out)>) -> Graph {
    let mut graph = decoder();
    let (bias, transposed) = (None, true);
    let norm = Some(Norm { weight: Some(NORM), eps: 1e-6, in_float32: false });
    let (x, gate, residual) = (Value(9), None, None);
    let block = Op::LinearBlock { x, weight: HEADS, bias, transposed, norm, gate, residual };
    let made = std::iter::once((block, Out::Tensor(Value(20)))).chain(replaced);
    // The positions are converted after the product.
    let instructions = &mut graph.main.instructions;
    let positions = instructions.remove(2);
    let mut made: Vec<Instruction> = made.map(|(op, out)| Instruction { op, out }).collect();
    let rotary = made.iter().position(|made| matches!(made.op, Op::Rotary { .. }));
    made.insert(rotary.unwrap_or(1), positions);
    instructions.splice(2..3, made);
    graph.n_values = 40;
    graph
}

fn view() -> Vec<Int> {
    vec![Int::Literal(1), Int::Value(IntValue(0)), Int::Literal(-1), Int::Literal(16)]
}

/// A layer of Qwen3 after the passes: queries and keys are normalized, so each piece has a separate view.
fn normalized() -> Graph {
    let perm = vec![0, 2, 1, 3];
    let split = Op::Split { x: Value(20), axis: -1, at: vec![64, 96], sizes: 128..=128 };
    let mut made = vec![(split, Out::Tensors(Value(21), 3))];
    for (piece, first, weight) in [(21, 24, NORM), (22, 28, PERIODS)] {
        let (x, weight, eps) = (Value(first), Some(weight), 1e-5);
        made.extend([
            tensor(Op::Reshape { x: Value(piece), shape: view() }, first),
            tensor(Op::RmsNorm { x, weight, eps }, first + 1),
            tensor(Op::Transpose { x: Value(first + 1), perm: perm.clone() }, first + 2),
        ]);
    }
    made.push(tensor(Op::ReshapeTranspose { x: Value(23), shape: view(), perm }, 13));
    for (x, out) in [(26, 11), (30, 12)] {
        let (x, offsets, dtype) = (Value(x), Value(10), Dtype::Bfloat16);
        made.push(tensor(Op::Rotary { x, offsets, periods: PERIODS, dtype }, out));
    }
    separate_heads(made)
}

/// A layer of SmolLM3 without rotation, after the passes.
fn unrotated() -> Graph {
    let view = Op::ReshapeTranspose { x: Value(20), shape: view(), perm: vec![0, 2, 1, 3] };
    let split = Op::Split { x: Value(21), axis: 1, at: vec![4, 6], sizes: 8..=8 };
    separate_heads(vec![tensor(view, 21), (split, Out::Tensors(Value(11), 3))])
}

fn heads_of(recipe: &Recipe) -> &LayerHeads {
    let of = |part| match part {
        &Part::Product(Product { ref heads, .. }) => heads.as_ref(),
        _ => None,
    };
    recipe.parts.iter().find_map(of).unwrap()
}

#[test]
fn heads_that_are_normalized_are_those_of_one_product() {
    let recipe = Recipe::of(&normalized()).unwrap();
    let norm = |weight| Some(RowNorm { weight: Some(weight), eps: 1e-5, out_dtype: None });
    let expected = LayerHeads {
        layer: 0,
        n_q: 4,
        n_kv: 2,
        head_dim: 16,
        rotation: Some((PERIODS, Dtype::Bfloat16)),
        rotated: 16,
        q_norm: norm(NORM),
        k_norm: norm(PERIODS),
    };
    assert_eq!(*heads_of(&recipe), expected);
    // All other parts are the same as if the product rotated its heads.
    let plain = Recipe::of(&decoder()).unwrap();
    let names =
        |recipe: &Recipe| -> Vec<_> { recipe.parts.iter().map(std::mem::discriminant).collect() };
    assert_eq!((names(&recipe), recipe.n_buffers), (names(&plain), plain.n_buffers));
    assert_eq!(recipe.parts[2..], plain.parts[2..]);
}

#[test]
fn heads_that_do_not_turn_are_those_of_one_product() {
    let recipe = Recipe::of(&unrotated()).unwrap();
    let heads = heads_of(&recipe);
    assert_eq!((heads.n_q, heads.n_kv, heads.head_dim, heads.rotation), (4, 2, 16, None));
    assert_eq!((heads.q_norm, heads.k_norm), (None, None));
    assert_eq!(recipe.parts[2..], Recipe::of(&decoder()).unwrap().parts[2..]);
}

#[test]
fn heads_that_differ_are_left_to_the_interpreter() {
    let changes: &[Change] = &[
        ("another view", change_ops!(Op::Reshape { shape, .. } => shape[2] = Int::Literal(4))),
        ("other axes", change_ops!(Op::Transpose { perm, .. } => *perm = vec![0, 1, 2, 3])),
        ("other positions", change_ops!(Op::Rotary { offsets, .. } => *offsets = IDS)),
        (
            "keys that rotate otherwise",
            change_ops!(Op::Rotary { x: Value(30), periods, .. } => *periods = NORM),
        ),
        ("a part of a head", change_ops!(Op::Split { at, .. } => at[0] = 60)),
        (
            "keys in the place of values",
            change_ops!(Op::UpdateAndAttend { k, v, .. } => std::mem::swap(k, v)),
        ),
        (
            "a norm's weight that is computed",
            change_ops!(Op::RmsNorm { weight, .. } => *weight = Some(Value(9))),
        ),
        (
            "a product with a gate",
            change_ops!(Op::LinearBlock { weight: HEADS, gate, .. } => *gate = Some(Unary::Silu)),
        ),
    ];
    is_known_only_without(normalized, changes);
    // Another instruction reads a value between the product and attention.
    for value in [20, 21, 24, 25, 26, 11, 13] {
        let mut graph = normalized();
        graph.main.instructions.push(made(Op::ExpandDims { x: Value(value), axis: 0 }, 39));
        assert!(Recipe::of(&graph).is_err(), "{value}");
    }
}

#[test]
fn what_is_not_known_is_told() {
    let mut graph = decoder();
    let op = Op::Unary { function: Unary::Tanh, x: Value(18) };
    graph.main.instructions.insert(9, made(op, 18));
    let told = Recipe::of(&graph).unwrap_err().to_string();
    assert!(told.starts_with("instruction 9, Tanh"), "{told}");
    let mut graph = decoder();
    graph.main.outputs.push(Out::Tensor(NORM));
    assert_eq!(Recipe::of(&graph), Err(Unknown::Outputs));
}

#[test]
fn programs_of_other_dtypes_are_told_apart() {
    use crate::steps::CudaSteps;
    use etkv_mlx_program::StepCompiler;
    let why_not = |graph: &Graph| CudaSteps.why_not(graph);
    let mut graph = decoder();
    assert_eq!(why_not(&graph), None);
    graph.constants[TABLE.0 as usize].dtype = Dtype::Float32;
    let told = why_not(&graph).unwrap();
    assert_eq!(told, "it computes in float32, not in float16 or bfloat16");
    graph.main.outputs.clear();
    assert_eq!(why_not(&graph), Some(Unknown::Outputs.to_string()));
}

mod hidden;
mod norms;
mod parts;
