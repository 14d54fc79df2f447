use super::*;
use crate::program::ir::{
    Binary, Chain, Constant, Dim, Heads, InputSpec, Instruction, Int, IntValue,
};

// Constants, and the inputs behind them.
const TABLE: Value = Value(0);
const NORM: Value = Value(1);
const HEADS: Value = Value(2);
const OUT: Value = Value(3);
const GATED: Value = Value(4);
const DOWN: Value = Value(5);
const PERIODS: Value = Value(6);
const IDS: Value = Value(7);
const POSITIONS: Value = Value(8);
const INT64: i8 = 4;

/// A decoder of one layer: 4 + 2 + 2 heads of 16.
fn decoder() -> Graph {
    let norm = Some(Norm { weight: Some(NORM), eps: 1e-6 });
    let heads = Heads {
        tokens: Int::Value(IntValue(0)),
        head_dim: 16,
        n: 8,
        at: vec![4, 6],
        turned: 6,
        offsets: Value(10),
        periods: PERIODS,
        dtype: Dtype::Bfloat16,
    };
    let (bias, transposed) = (None, true);
    let attend = Op::UpdateAndAttend {
        q: Value(11),
        k: Value(12),
        v: Value(13),
        position: POSITIONS,
        layer: 0,
        scale: 0.25,
        out_dtype: Some(Dtype::Bfloat16),
        last_query: false,
    };
    let shape = vec![Int::Literal(1), Int::Value(IntValue(0)), Int::Literal(-1)];
    let block = |x: u32, weight, norm, gate, plus| Op::LinearBlock {
        x: Value(x),
        weight,
        bias,
        transposed,
        norm,
        gate,
        plus,
    };
    let gate = Some(Unary::Silu);
    let tensor = |value| Out::Tensor(Value(value));
    let made = [
        (Op::SymSize { x: IDS, dim: 1 }, Out::Int(IntValue(0))),
        (Op::Take { x: TABLE, index: Index::Many(IDS), axis: 0 }, tensor(9)),
        (Op::AsType { x: POSITIONS, dtype: Dtype::Int32 }, tensor(10)),
        (
            Op::LinearHeads { x: Value(9), weight: HEADS, bias, transposed, norm, heads },
            Out::Tensors(Value(11), 3),
        ),
        (attend, tensor(14)),
        (Op::TransposeReshape { x: Value(14), perm: vec![0, 2, 1, 3], shape }, tensor(15)),
        (block(15, OUT, None, None, Some(Value(9))), tensor(16)),
        (block(16, GATED, norm, gate, None), tensor(17)),
        (block(17, DOWN, None, None, Some(Value(16))), tensor(18)),
        (block(18, TABLE, norm, None, None), tensor(19)),
    ];
    let constant = |index: u32| Constant {
        name: index.to_string(),
        shape: Vec::new(),
        dtype: Dtype::Bfloat16,
        joined: Vec::new(),
    };
    let input = |value, name: &str, shape| InputSpec::Tensor {
        value,
        name: name.to_owned(),
        shape,
        scalar_type: INT64,
    };
    Graph {
        constants: (0..7).map(constant).collect(),
        inputs: vec![
            input(IDS, "ids", vec![Dim::Static(1), Dim::UpTo(None)]),
            input(POSITIONS, "positions", vec![Dim::UpTo(None)]),
        ],
        init: Chain::default(),
        init_targets: Vec::new(),
        buffers: Vec::new(),
        main: Chain {
            instructions: made.map(|(op, out)| Instruction { op, out }).into(),
            outputs: vec![tensor(19)],
        },
        n_values: 20,
        n_ints: 1,
    }
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
            (product.x, product.weight, product.gate, product.plus, layer, product.out)
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
        |graph: &mut Graph| {
            if let Op::UpdateAndAttend { last_query, .. } = &mut graph.main.instructions[4].op {
                *last_query = true;
            }
        },
        |graph: &mut Graph| {
            let made =
                Instruction { op: Op::LastToken { x: Value(18) }, out: Out::Tensor(Value(18)) };
            graph.main.instructions.insert(9, made);
        },
    ] {
        let mut graph = decoder();
        change(&mut graph);
        assert!(Recipe::of(&graph).unwrap().last_row_only);
    }
}

#[test]
fn what_is_not_known_is_left_to_the_interpreter() {
    type Change = (&'static str, fn(&mut Graph));
    let changes: &[Change] = &[
        ("another op", |graph| {
            let op = Op::Unary { function: Unary::Tanh, x: Value(19) };
            graph.main.instructions.push(Instruction { op, out: Out::Tensor(Value(19)) });
        }),
        ("another gate", |graph| {
            if let Op::LinearBlock { gate, .. } = &mut graph.main.instructions[7].op {
                *gate = Some(Unary::Tanh);
            }
        }),
        ("a weight that is made", |graph| {
            if let Op::LinearBlock { weight, .. } = &mut graph.main.instructions[6].op {
                *weight = Value(9);
            }
        }),
        ("ids that are made", |graph| {
            if let Op::Take { index, .. } = &mut graph.main.instructions[1].op {
                *index = Index::Many(Value(10));
            }
        }),
        ("heads at other positions", |graph| {
            if let Op::LinearHeads { heads, .. } = &mut graph.main.instructions[3].op {
                heads.offsets = IDS;
            }
        }),
        ("attention at other positions", |graph| {
            if let Op::UpdateAndAttend { position, .. } = &mut graph.main.instructions[4].op {
                *position = IDS;
            }
        }),
        ("keys in the place of values", |graph| {
            if let Op::UpdateAndAttend { v, .. } = &mut graph.main.instructions[4].op {
                *v = Value(12);
            }
        }),
        ("values that turn", |graph| {
            if let Op::LinearHeads { heads, .. } = &mut graph.main.instructions[3].op {
                heads.turned = 8;
            }
        }),
        ("keys that others read", |graph| {
            let op = Op::ExpandDims { x: Value(12), axis: 0 };
            graph.main.instructions.push(Instruction { op, out: Out::Tensor(Value(19)) });
        }),
        ("two outputs", |graph| graph.main.outputs.push(Out::Tensor(Value(18)))),
        ("no attention", |graph| {
            graph.main.outputs = vec![Out::Tensor(Value(9))];
            graph.main.instructions.truncate(2);
        }),
    ];
    for (what, change) in changes {
        let mut graph = decoder();
        change(&mut graph);
        assert!(Recipe::of(&graph).is_err(), "{what}");
    }
}

/// The decoder with a layer whose heads the passes leave apart, in place of its product of heads. `apart` gets
/// the product, and makes the queries, the keys and the values that attention reads.
fn apart(apart: Vec<(Op, Out)>) -> Graph {
    let mut graph = decoder();
    let (bias, transposed) = (None, true);
    let norm = Some(Norm { weight: Some(NORM), eps: 1e-6 });
    let (x, gate, plus) = (Value(9), None, None);
    let block = Op::LinearBlock { x, weight: HEADS, bias, transposed, norm, gate, plus };
    let made = std::iter::once((block, Out::Tensor(Value(20)))).chain(apart);
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

fn tensor(op: Op, out: u32) -> (Op, Out) {
    (op, Out::Tensor(Value(out)))
}

/// What is left of Qwen3: queries and keys are normalized, so each piece is viewed alone.
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
    apart(made)
}

/// What is left of SmolLM3's layers that do not turn.
fn unturned() -> Graph {
    let view = Op::ReshapeTranspose { x: Value(20), shape: view(), perm: vec![0, 2, 1, 3] };
    let split = Op::Split { x: Value(21), axis: 1, at: vec![4, 6], sizes: 8..=8 };
    apart(vec![tensor(view, 21), (split, Out::Tensors(Value(11), 3))])
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
    let norm = |weight| Some(RowNorm { weight: Some(weight), eps: 1e-5, made: None });
    let expected = LayerHeads {
        layer: 0,
        n_q: 4,
        n_kv: 2,
        head_dim: 16,
        turn: Some((PERIODS, Dtype::Bfloat16)),
        q_norm: norm(NORM),
        k_norm: norm(PERIODS),
    };
    assert_eq!(*heads_of(&recipe), expected);
    // All else is as where the product turns its heads.
    let plain = Recipe::of(&decoder()).unwrap();
    let names =
        |recipe: &Recipe| -> Vec<_> { recipe.parts.iter().map(std::mem::discriminant).collect() };
    assert_eq!((names(&recipe), recipe.n_buffers), (names(&plain), plain.n_buffers));
    assert_eq!(recipe.parts[2..], plain.parts[2..]);
}

#[test]
fn heads_that_do_not_turn_are_those_of_one_product() {
    let recipe = Recipe::of(&unturned()).unwrap();
    let heads = heads_of(&recipe);
    assert_eq!((heads.n_q, heads.n_kv, heads.head_dim, heads.turn), (4, 2, 16, None));
    assert_eq!((heads.q_norm, heads.k_norm), (None, None));
    assert_eq!(recipe.parts[2..], Recipe::of(&decoder()).unwrap().parts[2..]);
}

#[test]
fn heads_that_differ_are_left_to_the_interpreter() {
    type Change = (&'static str, fn(&mut Op));
    let changes: &[Change] = &[
        ("another view", |op| {
            if let Op::Reshape { shape, .. } = op {
                shape[2] = Int::Literal(4);
            }
        }),
        ("other axes", |op| {
            if let Op::Transpose { perm, .. } = op {
                *perm = vec![0, 1, 2, 3];
            }
        }),
        ("other positions", |op| {
            if let Op::Rotary { offsets, .. } = op {
                *offsets = IDS;
            }
        }),
        ("keys that turn otherwise", |op| {
            if let Op::Rotary { x: Value(30), periods, .. } = op {
                *periods = NORM;
            }
        }),
        ("a part of a head", |op| {
            if let Op::Split { at, .. } = op {
                at[0] = 60;
            }
        }),
        ("keys in the place of values", |op| {
            if let Op::UpdateAndAttend { k, v, .. } = op {
                std::mem::swap(k, v);
            }
        }),
        ("a norm's weight that is made", |op| {
            if let Op::RmsNorm { weight, .. } = op {
                *weight = Some(Value(9));
            }
        }),
        ("a product with a gate", |op| {
            if let Op::LinearBlock { weight: HEADS, gate, .. } = op {
                *gate = Some(Unary::Silu);
            }
        }),
    ];
    for (what, change) in changes {
        let mut graph = normalized();
        graph.main.instructions.iter_mut().for_each(|made| change(&mut made.op));
        assert!(Recipe::of(&graph).is_err(), "{what}");
    }
    // What others read between a product and its attention.
    for value in [20, 21, 24, 25, 26, 11, 13] {
        let mut graph = normalized();
        let op = Op::ExpandDims { x: Value(value), axis: 0 };
        graph.main.instructions.push(Instruction { op, out: Out::Tensor(Value(39)) });
        assert!(Recipe::of(&graph).is_err(), "{value}");
    }
}

#[test]
fn what_is_not_known_is_told() {
    let mut graph = decoder();
    let op = Op::Unary { function: Unary::Tanh, x: Value(18) };
    graph.main.instructions.insert(9, Instruction { op, out: Out::Tensor(Value(18)) });
    let told = Recipe::of(&graph).unwrap_err().to_string();
    assert!(told.starts_with("instruction 9, Tanh"), "{told}");
    let mut graph = decoder();
    graph.main.outputs.push(Out::Tensor(Value(18)));
    assert_eq!(Recipe::of(&graph), Err(Unknown::Outputs));
}

/// What is left of Gemma 3: norms of float32, converted, after each half of a layer too, and embeddings that are
/// scaled.
fn with_norms() -> Graph {
    let mut graph = normalized();
    let (bias, transposed) = (None, true);
    let norm = |x, out| {
        let (x, weight) = (Value(x), Some(NORM));
        let converted = Op::AsType { x: Value(out), dtype: Dtype::Bfloat16 };
        [tensor(Op::RmsNorm { x, weight, eps: 1e-6 }, out), tensor(converted, out + 1)]
    };
    let linear = |x, weight, out| tensor(Op::Linear { x: Value(x), weight, bias, transposed }, out);
    let add =
        |a, b, out| tensor(Op::Binary { function: Binary::Add, a: Value(a), b: Value(b) }, out);
    let scaled = Op::Binary { function: Binary::Multiply, a: Value(9), b: PERIODS };
    let (norm_none, gate, plus) = (None, Some(Unary::GeluTanh), None);
    let gated = Op::LinearBlock {
        x: Value(49),
        weight: GATED,
        bias,
        transposed,
        norm: norm_none,
        gate,
        plus,
    };
    let instructions = std::mem::take(&mut graph.main.instructions);
    let mut made = Vec::new();
    for instruction in instructions {
        let Instruction { op, out } = instruction;
        match op {
            Op::Take { .. } => {
                made.extend([(op, out), tensor(scaled.clone(), 40)]);
                made.extend(norm(40, 41));
            }
            Op::LinearBlock { weight: HEADS, .. } => made.push(linear(42, HEADS, 20)),
            // Heads are normalized in float32 too.
            Op::RmsNorm { x, weight, eps } => {
                let Out::Tensor(Value(number)) = out else { panic!("{out:?}") };
                made.push(tensor(Op::RmsNorm { x, weight, eps }, number + 40));
                let x = Value(number + 40);
                made.push((Op::AsType { x, dtype: Dtype::Bfloat16 }, out));
            }
            Op::LinearBlock { .. } => {}
            _ => made.push((op, out)),
        }
    }
    made.push(linear(15, OUT, 43));
    made.extend(norm(43, 44));
    made.push(add(40, 45, 46));
    made.extend(norm(46, 48));
    made.push(tensor(gated, 50));
    made.push(linear(50, DOWN, 51));
    made.extend(norm(51, 52));
    made.push(add(46, 53, 54));
    made.extend(norm(54, 55));
    made.push(linear(56, TABLE, 19));
    graph.main.instructions = made.into_iter().map(|(op, out)| Instruction { op, out }).collect();
    graph.n_values = 120;
    graph
}

#[test]
fn norms_that_no_product_takes_on_are_known() {
    let recipe = Recipe::of(&with_norms()).unwrap();
    let [embed, first, heads, attend, out, after, gated, down, last, head] = &recipe.parts[..]
    else {
        panic!("{:#?}", recipe.parts);
    };
    let table = Weight::Plain { value: TABLE, transposed: false };
    assert_eq!(*embed, Part::Embed { table, scale: Some(PERIODS), out: 0 });
    let norm = RowNorm { weight: Some(NORM), eps: 1e-6, made: Some(Dtype::Bfloat16) };
    let rows = |part: &Part| match part {
        Part::Normalize(Normalize { x, norm: found, plus, out, next }) => {
            assert_eq!(*found, norm);
            (*x, *plus, *out, next.map(|(found, out)| (found == norm, out)))
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(rows(first), (0, None, 1, None));
    let head_norm = |weight| Some(RowNorm { weight: Some(weight), eps: 1e-5, ..norm });
    let heads_found = heads_of(&recipe);
    assert_eq!((heads_found.q_norm, heads_found.k_norm), (head_norm(NORM), head_norm(PERIODS)));
    let product = |part: &Part| match part {
        Part::Product(product) => (product.x, product.norm.is_some(), product.gate, product.out),
        other => panic!("{other:?}"),
    };
    assert_eq!(product(heads), (1, false, None, 2));
    assert!(matches!(attend, Part::Attend { q: 2, out: 3, .. }));
    assert_eq!(product(out), (3, false, None, 4));
    // The sum with the embeddings, and the norm before the next half of the layer.
    assert_eq!(rows(after), (4, Some(0), 5, Some((true, 6))));
    assert_eq!(product(gated), (6, false, Some(Gate::GeluTanh), 7));
    assert_eq!(product(down), (7, false, None, 8));
    assert_eq!(rows(last), (8, Some(5), 9, Some((true, 10))));
    assert_eq!(product(head), (10, false, None, 11));
    assert_eq!((recipe.logits, recipe.n_buffers), (11, 12));
}

#[test]
fn other_norms_and_scales_are_left_to_the_interpreter() {
    type Change = (&'static str, fn(&mut Graph));
    let changes: &[Change] = &[
        ("embeddings that are read unscaled", |graph| {
            let op = Op::RmsNorm { x: Value(9), weight: None, eps: 0.0 };
            graph.main.instructions.insert(3, Instruction { op, out: Out::Tensor(Value(110)) });
        }),
        ("embeddings that are divided", |graph| {
            for made in &mut graph.main.instructions {
                if let Op::Binary { function: function @ Binary::Multiply, .. } = &mut made.op {
                    *function = Binary::Divide;
                }
            }
        }),
        ("embeddings that are multiplied with others", |graph| {
            for made in &mut graph.main.instructions {
                if let Op::Binary { function: Binary::Multiply, b, .. } = &mut made.op {
                    *b = Value(9);
                }
            }
        }),
        ("weights that are made", |graph| {
            for made in &mut graph.main.instructions {
                if let Op::RmsNorm { x: Value(43), weight, .. } = &mut made.op {
                    *weight = Some(Value(40));
                }
            }
        }),
        ("a sum that is read before it is made", |graph| {
            for made in &mut graph.main.instructions {
                if let Op::Binary { function: Binary::Add, a: a @ Value(40), .. } = &mut made.op {
                    *a = Value(54);
                }
            }
        }),
    ];
    for (what, change) in changes {
        let mut graph = with_norms();
        change(&mut graph);
        assert!(Recipe::of(&graph).is_err(), "{what}");
    }
}
