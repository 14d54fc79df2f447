use super::super::*;
use super::{decoder, IDS, NORM, OUT, TABLE};
use crate::steps::testing::{change_ops, is_known_only_without, made, Change};
use etkv_mlx_program::ir::{Dim, InputSpec};

const ROWS: Value = Value(30);
const KNOWN: Value = Value(31);
const BFLOAT16: i8 = 15;

#[test]
fn hidden_states_are_another_output() {
    let with = |tapped: &[u32], axis| {
        let mut graph = decoder();
        let tensors = tapped.iter().map(|&x| Value(x)).collect();
        graph.main.instructions.push(made(Op::Concatenate { tensors, axis }, 20));
        graph.main.outputs.push(Out::Tensor(Value(20)));
        graph.n_values = 21;
        graph
    };
    let found = |graph: &Graph| {
        Recipe::of(graph).map(|recipe| (recipe.logits, recipe.logits_at, recipe.tapped))
    };
    for axis in [-1, 2] {
        assert_eq!(found(&with(&[18], axis)), Ok((6, 0, vec![5])));
        let mut graph = with(&[18, 16, 9], axis);
        assert_eq!(found(&graph), Ok((6, 0, vec![5, 3, 0])));
        assert!(Recipe::with_known_logits(&graph).is_ok());
        graph.main.outputs.reverse();
        assert_eq!(found(&graph), Ok((6, 1, vec![5, 3, 0])));
        assert_eq!(Recipe::with_known_logits(&graph), Err(Unknown::Logits), "two wide outputs");
    }
    // An output that is one buffer, without a concatenation.
    let mut graph = decoder();
    graph.main.outputs.insert(0, Out::Tensor(Value(16)));
    assert_eq!(found(&graph), Ok((6, 1, vec![3])));
    assert_eq!(found(&decoder()), Ok((6, 0, Vec::new())));
    assert!(found(&with(&[18], 1)).is_err(), "rows along another axis");
    assert!(found(&with(&[TABLE.0], -1)).is_err(), "a constant");
    assert_eq!(found(&with(&[18, 18], -1)), Err(Unknown::Outputs), "the same rows twice");
    assert_eq!(found(&with(&[18, 19], -1)), Err(Unknown::Outputs), "the logits again");
    let mut graph = with(&[18], -1);
    graph.main.outputs.pop();
    assert!(found(&graph).is_err(), "rows that are not an output");
    let mut graph = with(&[18], -1);
    graph.main.outputs.push(Out::Tensor(Value(18)));
    assert_eq!(found(&graph), Err(Unknown::Outputs), "three outputs");
}

/// The decoder after a feature predictor. The input of its layer is `p + known * (rows - p)`. `p` is the
/// product of the joined norms of the embeddings and of the rows that the host passes.
fn draft() -> Graph {
    let mut graph = decoder();
    let input = |value, name: &str, width| InputSpec::Tensor {
        value,
        name: name.to_owned(),
        shape: vec![Dim::Static(1), Dim::UpTo(None), Dim::Static(width)],
        scalar_type: BFLOAT16,
    };
    graph.inputs.insert(0, input(ROWS, "hidden_states", 64));
    graph.inputs.push(input(KNOWN, "known", 1));
    let norm = |x| Op::RmsNorm { x, weight: None, eps: 1e-6 };
    let binary = |function, a, b| Op::Binary { function, a: Value(a), b: Value(b) };
    let tensors = vec![Value(41), Value(42)];
    let predicted = Op::Linear { x: Value(43), weight: OUT, bias: Some(NORM), transposed: true };
    let mut head = vec![
        made(Op::Take { x: TABLE, index: Index::Many(IDS), axis: 0 }, 40),
        made(norm(Value(40)), 41),
        made(norm(ROWS), 42),
        made(Op::Concatenate { tensors, axis: -1 }, 43),
        made(predicted, 44),
        made(binary(Binary::Subtract, ROWS.0, 44), 45),
        made(binary(Binary::Multiply, KNOWN.0, 45), 46),
        made(binary(Binary::Add, 44, 46), 9),
    ];
    let mut rest = graph.main.instructions.split_off(2);
    graph.main.instructions.truncate(1);
    graph.main.instructions.append(&mut head);
    graph.main.instructions.append(&mut rest);
    graph.main.outputs.insert(0, Out::Tensor(Value(9)));
    graph.n_values = 50;
    graph
}

#[test]
fn drafts_fed_with_hidden_states_are_known() {
    let recipe = Recipe::of(&draft()).unwrap();
    let given = |value, width, buffer| RowInput { value, width, dtype: Dtype::Bfloat16, buffer };
    assert_eq!(recipe.given, [given(ROWS, 64, 0), given(KNOWN, 1, 1)]);
    let [embed, norm, next, join, product, blend, heads, ..] = &recipe.parts[..] else {
        panic!("{:#?}", recipe.parts);
    };
    assert!(matches!(embed, Part::Embed { out: 2, .. }));
    let rows = |part: &Part| match part {
        Part::Normalize(Normalize { x, norm, residual: None, out, next: None }) => {
            assert_eq!(*norm, RowNorm { weight: None, eps: 1e-6, out_dtype: None });
            (*x, *out)
        }
        other => panic!("{other:?}"),
    };
    assert_eq!((rows(norm), rows(next)), ((2, 3), (0, 4)));
    assert_eq!(*join, Part::Join { x: vec![3, 4], out: 5 });
    match product {
        Part::Product(found) => {
            assert_eq!((found.x, found.bias, found.out), (5, Some(NORM), 6));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(*blend, Part::Blend { x: 6, y: 0, share: 1, out: 7 });
    assert!(matches!(heads, Part::Product(Product { x: 7, heads: Some(_), .. })));
    // The other output is the input of the layer.
    assert_eq!((recipe.logits_at, &recipe.tapped[..]), (1, &[7][..]));
}

#[test]
fn other_rows_and_blends_are_left_to_the_interpreter() {
    let changes: &[Change] = &[
        ("rows joined along another axis", change_ops!(Op::Concatenate { axis, .. } => *axis = 1)),
        (
            "rows joined that are no norms",
            change_ops!(Op::Concatenate { tensors, .. } => tensors[0] = Value(40)),
        ),
        (
            "a norm that is read twice",
            change_ops!(Op::Concatenate { tensors, .. } => tensors[0] = Value(42)),
        ),
        (
            "the difference the other way",
            change_ops!(
                Op::Binary { function: Binary::Subtract, a, b } => std::mem::swap(a, b)
            ),
        ),
        (
            "the share of another sum",
            change_ops!(Op::Binary { function: Binary::Add, a, .. } => *a = ROWS),
        ),
        (
            "a sum in place of a product",
            change_ops!(
                Op::Binary { function: function @ Binary::Multiply, .. } => *function = Binary::Add
            ),
        ),
        (
            "a share that is a constant",
            change_ops!(Op::Binary { function: Binary::Multiply, a, .. } => *a = NORM),
        ),
        ("a given row that comes back", |graph| graph.main.outputs[0] = Out::Tensor(ROWS)),
        ("rows of any width", |graph| {
            if let InputSpec::Tensor { shape, .. } = &mut graph.inputs[0] {
                shape[2] = Dim::UpTo(None);
            }
        }),
        ("rows of integers", |graph| {
            if let InputSpec::Tensor { scalar_type, .. } = &mut graph.inputs[0] {
                *scalar_type = 4;
            }
        }),
    ];
    is_known_only_without(draft, changes);
    // The factors of a product and the summands of a sum may be swapped.
    let mut graph = draft();
    let swap = change_ops!(
        Op::Binary { function: Binary::Multiply | Binary::Add, a, b } => std::mem::swap(a, b)
    );
    swap(&mut graph);
    assert_eq!(Recipe::of(&graph), Recipe::of(&draft()));
}
