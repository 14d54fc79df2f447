//! Norms that are not part of a product, as in Gemma 3.

use super::*;

/// The decoder with the norms of Gemma 3 after the passes. The norms are float32 and their results are
/// converted. There is also a norm after each half of a layer. Embeddings are scaled.
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
    let (norm_none, gate, residual) = (None, Some(Unary::GeluTanh), None);
    let gated = Op::LinearBlock {
        x: Value(49),
        weight: GATED,
        bias,
        transposed,
        norm: norm_none,
        gate,
        residual,
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
            // Heads are normalized in float32, too.
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
    let norm = RowNorm { weight: Some(NORM), eps: 1e-6, out_dtype: Some(Dtype::Bfloat16) };
    let rows = |part: &Part| match part {
        Part::Normalize(Normalize { x, norm: found, residual, out, next }) => {
            assert_eq!(*found, norm);
            (*x, *residual, *out, next.map(|(found, out)| (found == norm, out)))
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
    // The residual with the embeddings, and the norm before the next half of the layer.
    assert_eq!(rows(after), (4, Some(0), 5, Some((true, 6))));
    assert_eq!(product(gated), (6, false, Some(Gate::GeluTanh), 7));
    assert_eq!(product(down), (7, false, None, 8));
    assert_eq!(rows(last), (8, Some(5), 9, Some((true, 10))));
    assert_eq!(product(head), (10, false, None, 11));
    assert_eq!((recipe.logits, recipe.n_buffers), (11, 12));
}

#[test]
fn other_norms_and_scales_are_left_to_the_interpreter() {
    let changes: &[Change] = &[
        ("embeddings that are read unscaled", |graph| {
            let op = Op::RmsNorm { x: Value(9), weight: None, eps: 0.0 };
            graph.main.instructions.insert(3, made(op, 110));
        }),
        (
            "embeddings that are divided",
            change_ops!(
                Op::Binary { function: function @ Binary::Multiply, .. } =>
                    *function = Binary::Divide
            ),
        ),
        (
            "embeddings that are multiplied with others",
            change_ops!(Op::Binary { function: Binary::Multiply, b, .. } => *b = Value(9)),
        ),
        (
            "weights that are computed",
            change_ops!(Op::RmsNorm { x: Value(43), weight, .. } => *weight = Some(Value(40))),
        ),
        (
            "a sum that is read before it is computed",
            change_ops!(
                Op::Binary { function: Binary::Add, a: a @ Value(40), .. } => *a = Value(54)
            ),
        ),
    ];
    is_known_only_without(with_norms, changes);
}
