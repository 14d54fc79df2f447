//! Tests of functions for which ExecuTorch has no tests.

use std::collections::BTreeMap;

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
    let mut none = Weights(BTreeMap::new());
    let program = Program::load(&payload, &mut none, &LoadOptions::default(), None).unwrap();
    let held: Vec<_> = inputs.iter().map(|(shape, numbers)| (*shape, bytes(numbers))).collect();
    let arguments: Vec<_> =
        held.iter().map(|(shape, bytes)| Argument::tensor(FLOAT32, shape, bytes)).collect();
    let mut made = Outputs::default();
    program.execute(&arguments, &vec![FLOAT32; n_made as usize], &mut made).unwrap();
    made.floats()
}

#[test]
fn medians() {
    let median = |builder: &mut Builder, axes: &[i32], keepdims, out| {
        let axes = Some(builder.create_vector(axes));
        let (x, out) = (fb::Tid::new(0), fb::Tid::new(out));
        let args = fb::MedianNodeArgs { x: Some(&x), out: Some(&out), axes, keepdims };
        (fb::OpNode::MedianNode, fb::MedianNode::create(builder, &args).as_union_value())
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
        let [n, m] = [2, 3].map(|literal| {
            let args = fb::IntOrVidArgs { literal, ..Default::default() };
            Some(fb::IntOrVid::create(builder, &args))
        });
        let out = fb::Tid::new(out);
        let args = fb::TriNodeArgs { out: Some(&out), n, m, k, scalar_type: FLOAT32 };
        (fb::OpNode::TriNode, fb::TriNode::create(builder, &args).as_union_value())
    };
    let made = run(&[], 2, |builder| vec![tri(builder, 0, 0), tri(builder, 1, 1)]);
    assert_eq!(made[0], (vec![2, 3], vec![1.0, 0.0, 0.0, 1.0, 1.0, 0.0]));
    assert_eq!(made[1], (vec![2, 3], vec![1.0, 1.0, 0.0, 1.0, 1.0, 1.0]));
}
