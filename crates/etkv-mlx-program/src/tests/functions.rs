//! Tests of functions for which ExecuTorch has no tests.

use super::*;

fn run(
    inputs: &[(&[i32], &[f32])],
    n_made: u32,
    build: impl FnOnce(&mut Builder) -> Vec<Node>,
) -> Vec<(Vec<i32>, Vec<f32>)> {
    let n = inputs.len() as u32;
    let parts = Parts {
        inputs: inputs.iter().map(|(shape, _)| (shape.to_vec(), FLOAT32)).collect(),
        n_temporaries: n_made,
        outputs: (n..n + n_made).collect(),
        ..Default::default()
    };
    let payload = parts.payload(|builder| vec![build(builder)]);
    let program = load(&payload, Weights::of([]), None).unwrap();
    let held: Vec<_> = inputs.iter().map(|(shape, numbers)| (*shape, bytes(numbers))).collect();
    let arguments: Vec<_> =
        held.iter().map(|(shape, bytes)| Argument::tensor(FLOAT32, shape, bytes)).collect();
    execute(&program, &arguments).unwrap()
}

#[test]
fn medians() {
    let median = |builder: &mut Builder, axes: &[i32], keepdims, out| {
        let axes = Some(builder.create_vector(axes));
        node!(builder, MedianNode, MedianNodeArgs, [x: 0, out: out], axes: axes, keepdims: keepdims)
    };
    let x = [9.0, 1.0, 5.0, -2.0, 4.0, 0.0];
    let made = run(&[(&[2, 3], &x)], 3, |builder| {
        vec![
            median(builder, &[], false, 1),
            median(builder, &[-1], true, 2),
            median(builder, &[0], false, 3),
        ]
    });
    // The median of an even number of elements is the mean of the two in the middle.
    let expected =
        [(vec![], vec![2.5]), (vec![2, 1], vec![5.0, 0.0]), (vec![3], vec![3.5, 2.5, 2.5])];
    assert_eq!(made, expected);
}

#[test]
fn triangles_of_ones() {
    let tri = |builder: &mut Builder, k, out| {
        let [n, m] = [2, 3].map(|size| Some(literal(builder, size)));
        node!(builder, TriNode, TriNodeArgs, [out: out], n: n, m: m, k: k, scalar_type: FLOAT32)
    };
    let made = run(&[], 2, |builder| vec![tri(builder, 0, 0), tri(builder, 1, 1)]);
    assert_eq!(made[0], (vec![2, 3], vec![1.0, 0.0, 0.0, 1.0, 1.0, 0.0]));
    assert_eq!(made[1], (vec![2, 3], vec![1.0, 1.0, 0.0, 1.0, 1.0, 1.0]));
}
