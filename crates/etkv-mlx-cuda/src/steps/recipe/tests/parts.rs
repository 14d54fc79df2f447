//! Heads of which only a part rotates, and gates whose halves the program splits, as in Phi-3.

use super::*;

/// The decoder in which the first 8 elements of each head rotate, with a gate on a product of 64 rows.
fn partly() -> Graph {
    let (perm, sizes) = (vec![0, 2, 1, 3], 0..=i32::MAX);
    let split = |x, axis, at, out, n| {
        let op = Op::Split { x: Value(x), axis, at, sizes: sizes.clone() };
        (op, Out::Tensors(Value(out), n))
    };
    let seen = |x, out| {
        tensor(Op::ReshapeTranspose { x: Value(x), shape: view(), perm: perm.clone() }, out)
    };
    let mut made =
        vec![split(20, 2, vec![64, 96], 21, 3), seen(21, 24), seen(22, 25), seen(23, 13)];
    for (x, parts, rotated, out) in [(24, 26, 30, 11), (25, 28, 31, 12)] {
        let (offsets, dtype) = (Value(10), Dtype::Bfloat16);
        let rotary = Op::Rotary { x: Value(parts), offsets, periods: PERIODS, dtype };
        let tensors = vec![Value(rotated), Value(parts + 1)];
        made.extend([
            split(x, 3, vec![8], parts, 2),
            tensor(rotary, rotated),
            tensor(Op::Concatenate { tensors, axis: -1 }, out),
        ]);
    }
    let mut graph = separate_heads(made);
    let instructions = &mut graph.main.instructions;
    let is_gated = |made: &Instruction| matches!(made.op, Op::LinearBlock { gate: Some(_), .. });
    let place = instructions.iter().position(is_gated).unwrap();
    let whole = &mut instructions[place];
    if let Op::LinearBlock { gate, .. } = &mut whole.op {
        *gate = None;
    }
    whole.out = Out::Tensor(Value(32));
    let activation = Op::Activation { function: Unary::Silu, x: Value(33), by: Some(Value(34)) };
    let halves = [split(32, 2, vec![32], 33, 2), tensor(activation, 17)];
    let halves = halves.map(|(op, out)| Instruction { op, out });
    instructions.splice(place + 1..place + 1, halves);
    graph.constants[GATED.0 as usize].shape = vec![64, 16];
    graph
}

#[test]
fn parts_of_heads_and_halves_of_products_are_known() {
    let recipe = Recipe::of(&partly()).unwrap();
    let heads = heads_of(&recipe);
    assert_eq!((heads.n_q, heads.n_kv, heads.head_dim, heads.rotated), (4, 2, 16, 8));
    assert_eq!(heads.rotation, Some((PERIODS, Dtype::Bfloat16)));
    // All other parts are the same as if whole heads rotated and the passes merged the gate.
    let plain = Recipe::of(&decoder()).unwrap();
    assert_eq!((&recipe.parts[2..], recipe.n_buffers), (&plain.parts[2..], plain.n_buffers));
    // The rows of joined weights count as rows of the weight.
    let mut graph = partly();
    let gated = &mut graph.constants[GATED.0 as usize];
    gated.shape[0] = 32;
    gated.joined = vec![gated.clone()];
    assert!(Recipe::of(&graph).is_ok());
}

#[test]
fn other_parts_and_halves_are_left_to_the_interpreter() {
    let changes: &[Change] = &[
        ("other rows than two halves", |graph| {
            graph.constants[GATED.0 as usize].shape[0] = 96;
        }),
        (
            "the other half activated",
            change_ops!(
                Op::Activation { x, by, .. } => (*x, *by) = (Value(34), Some(Value(33)))
            ),
        ),
        ("a half that others read", |graph| {
            graph.main.instructions.push(made(Op::ExpandDims { x: Value(34), axis: 0 }, 39));
        }),
        (
            "parts in another order",
            change_ops!(Op::Concatenate { tensors, .. } => tensors.swap(0, 1)),
        ),
        (
            "keys of which more rotates",
            change_ops!(Op::Split { x: Value(25), at, .. } => at[0] = 12),
        ),
        ("parts along another axis", change_ops!(Op::Concatenate { axis, .. } => *axis = 2)),
        (
            "a part that rotates at other positions",
            change_ops!(Op::Rotary { offsets, .. } => *offsets = IDS),
        ),
    ];
    is_known_only_without(partly, changes);
}
