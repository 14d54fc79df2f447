use super::*;
use crate::program::ir::{Chain, Constant, Dim, InputSpec, Instruction, Int, IntValue};

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
    assert_eq!(*embed, Part::Embed { table: plain(TABLE, false), out: 0 });
    let dtype = Some(Dtype::Bfloat16);
    assert_eq!(*attend, Part::Attend { layer: 0, q: 1, scale: 0.25, dtype, out: 2 });
    let products = [heads, out, gated, down, head].map(|part| match part {
        Part::Product(product) => {
            let layer = product.heads.as_ref().map(|(_, layer)| *layer);
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
        assert_eq!(Recipe::of(&graph), None, "{what}");
    }
}
