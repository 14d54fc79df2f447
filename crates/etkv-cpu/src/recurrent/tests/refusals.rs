//! Invalid inputs, and inputs with other dtypes and strides.

use std::sync::Arc;

use etkv_core::bookkeeping::{AnchorSource, Chain, RecurrentPlan, RowSource};
use etkv_core::{KvFormat, RecurrentSpec, Result, Status};
use half::{bf16, f16};

use crate::attention::synthetic::{view, Random};
use crate::parallel::Serial;
use crate::recurrent::{convolve, scan, Activation, ConvolveInputs, Scan, ScanInputs, Workspace};
use crate::refused::refused;
use crate::store::view::View;
use crate::tensor::{Dtype, Tensor};

const SCAN: Scan =
    Scan { k_heads: 1, heads: 2, k_dim: 4, v_dim: 6, channel_decay: false, scale: 0.5 };

/// Returns inputs of a scan of two tokens: queries, keys, values, decays, write strengths.
fn inputs() -> [Tensor; 5] {
    let mut random = Random::new(1);
    [[1, 1, 2, 4], [1, 1, 2, 4], [1, 2, 2, 6], [1, 2, 2, 1], [1, 2, 2, 1]].map(|shape| {
        let n = shape.iter().product::<i32>();
        Tensor::new(shape, (0..n).map(|_| -random.number().abs()).collect::<Vec<_>>()).unwrap()
    })
}

/// Returns the plan of two tokens at position 65, after the rows in slots 2 and 0 and the anchor in slot 1.
fn plan() -> RecurrentPlan {
    RecurrentPlan {
        chains: vec![Chain {
            tokens: 0..2,
            position: 65,
            rows: vec![RowSource::Slot(2), RowSource::Slot(0)],
            anchor: AnchorSource::Slot(1),
            base: 64,
            folds: 0..0,
        }],
        stored: vec![0, 1],
        ..RecurrentPlan::default()
    }
}

fn spec(plan: RecurrentPlan) -> RecurrentSpec<View> {
    let mut random = Random::new(2);
    let mut rows = |heads, dim, slots| view(KvFormat::F32, heads, dim, slots, &mut random).unwrap();
    RecurrentSpec {
        rows: [Some(rows(1, 4, 3)), Some(rows(2, 7, 3))],
        anchors: Some(rows(2, 24, 2)),
        plan: Arc::new(plan),
    }
}

fn run(tensors: &[Tensor; 5], spec: &RecurrentSpec<View>, dtype: Dtype) -> Result<Tensor> {
    let [q, k, v, g, beta] = tensors;
    let inputs = ScanInputs { q, k, v, g, beta: Some(beta) };
    let out = scan(&SCAN, &inputs, spec, Some(dtype), &mut Workspace::new(), &Serial)?;
    assert_eq!(
        out.1.rows.map(|rows| rows.map(|rows| *rows.shape())),
        [Some([1, 1, 2, 4]), Some([1, 2, 2, 7])]
    );
    Ok(out.0)
}

#[test]
fn inputs_of_other_shapes_are_refused() {
    assert!(run(&inputs(), &spec(plan()), Dtype::F32).is_ok());
    let names = ["queries", "keys", "values", "decays", "write strengths"];
    for (i, name) in names.into_iter().enumerate() {
        for axis in 0..4 {
            let mut tensors = inputs();
            let expected = *tensors[i].shape();
            let mut shape = expected;
            shape[axis] += 1;
            let n = shape.iter().product::<i32>() as usize;
            tensors[i] = Tensor::new(shape, vec![0f32; n]).unwrap();
            let told = format!("expected {name} of shape {expected:?}, got {shape:?}");
            refused(run(&tensors, &spec(plan()), Dtype::F32), Status::Shape, &told);
        }
    }
    let [q, k, v, g, _] = &inputs();
    for [k_heads, heads, k_dim, v_dim] in
        [[0, 2, 4, 6], [1, 0, 4, 6], [3, 2, 4, 6], [1, 2, 0, 6], [1, 2, usize::MAX, 6]]
    {
        let other = Scan { k_heads, heads, k_dim, v_dim, ..SCAN };
        let inputs = ScanInputs { q, k, v, g, beta: None };
        let result = scan(&other, &inputs, &spec(plan()), None, &mut Workspace::new(), &Serial);
        refused(result, Status::Shape, "");
    }
}

#[test]
fn rows_of_other_shapes_are_refused() {
    let mut random = Random::new(3);
    let mut rows = |format, heads, dim| view(format, heads, dim, 3, &mut random).unwrap();
    let f32s = KvFormat::F32;
    for (other, words) in [
        (rows(f32s, 2, 4), "expected keys of 1 heads with 4 elements in f32, got 2 heads with 4"),
        (rows(f32s, 1, 5), "got 1 heads with 5"),
        (rows(KvFormat::F16, 1, 4), "in f16"),
    ] {
        let mut spec = spec(plan());
        spec.rows[0] = Some(other);
        refused(run(&inputs(), &spec, Dtype::F32), Status::Shape, words);
    }
    let mut other = spec(plan());
    other.rows[1] = Some(rows(f32s, 2, 6));
    refused(
        run(&inputs(), &other, Dtype::F32),
        Status::Shape,
        "updates of 2 heads with 7 elements in f32, got 2 heads with 6",
    );
    let mut other = spec(plan());
    other.anchors = Some(rows(f32s, 2, 23));
    refused(
        run(&inputs(), &other, Dtype::F32),
        Status::Shape,
        "anchors of 2 heads with 24 elements in f32, got 2 heads with 23",
    );
}

#[test]
fn plans_that_name_what_does_not_exist_are_refused() {
    type Change = fn(&mut RecurrentPlan);
    let changes: [(Change, Status); 17] = [
        (|plan| plan.chains[0].tokens = 0..3, Status::Shape),
        (|plan| plan.chains[0].tokens = 1..2, Status::Internal),
        (|plan| plan.chains[0].position = -1, Status::Internal),
        (|plan| plan.chains[0].rows[0] = RowSource::Slot(3), Status::Internal),
        (|plan| plan.chains[0].rows[0] = RowSource::Slot(-1), Status::Internal),
        (|plan| plan.chains[0].rows[0] = RowSource::Token(0), Status::Internal),
        (|plan| plan.chains[0].rows.clear(), Status::Internal),
        (|plan| plan.chains[0].anchor = AnchorSource::Zero, Status::Internal),
        (|plan| plan.chains[0].anchor = AnchorSource::Slot(2), Status::Internal),
        (|plan| plan.chains[0].anchor = AnchorSource::Fold(0), Status::Internal),
        (|plan| plan.chains[0].base = 63, Status::Internal),
        (|plan| plan.chains[0].base = 128, Status::Internal),
        (|plan| plan.chains[0].base = 0, Status::Internal),
        (|plan| plan.chains[0].position = 127, Status::Internal),
        (|plan| plan.folds = vec![None], Status::Internal),
        (|plan| plan.stored = vec![1, 0], Status::Internal),
        (|plan| plan.stored = vec![2], Status::Internal),
    ];
    for (i, (change, status)) in changes.into_iter().enumerate() {
        let mut plan = plan();
        change(&mut plan);
        let error = run(&inputs(), &spec(plan), Dtype::F32).unwrap_err();
        assert_eq!(error.status(), status, "change {i}: {error}");
    }
    let mut without = spec(plan());
    without.rows[1] = None;
    refused(run(&inputs(), &without, Dtype::F32), Status::Internal, "Slot(2)");
    without = spec(plan());
    without.anchors = None;
    refused(run(&inputs(), &without, Dtype::F32), Status::Internal, "Slot(1)");
}

#[test]
fn convolutions_that_do_not_fit_are_refused() {
    let tensor = |shape: [i32; 4]| {
        Tensor::new(shape, vec![0.5f32; shape.iter().product::<i32>() as usize]).unwrap()
    };
    let run = |x: [i32; 4], weight: [i32; 4], bias: [i32; 4]| {
        let (x, weight, bias) = (tensor(x), tensor(weight), tensor(bias));
        let activation = Activation::None;
        let inputs = ConvolveInputs { x: &x, weight: &weight, bias: Some(&bias), activation };
        let mut plan = plan();
        plan.stored.remove(0);
        let mut spec = spec(plan);
        spec.rows[1] = None;
        let (out, rows) = convolve(&inputs, &spec, None, &mut Workspace::new(), &Serial)?;
        assert_eq!(rows.rows[0].as_ref().map(Tensor::shape), Some(&[1, 1, 1, 4]));
        Ok(out)
    };
    let (x, weight, bias) = ([1, 4, 2, 1], [1, 1, 4, 3], [1, 1, 1, 4]);
    assert_eq!(run(x, weight, bias).unwrap().shape(), &x);
    for (x, weight, bias, words) in [
        ([2, 4, 2, 1], weight, bias, "columns"),
        ([1, 4, 3, 1], weight, bias, "2 tokens"),
        ([1, 4, 2, 2], weight, bias, "columns"),
        ([1, 5, 2, 1], [1, 1, 5, 3], [1, 1, 1, 5], "columns of 1 heads with 5"),
        ([1, 0, 2, 1], [1, 1, 0, 3], [1, 1, 1, 0], "1 channel"),
        (x, [1, 1, 4, 0], bias, "width"),
        (x, [1, 1, 3, 3], bias, "weights"),
        (x, weight, [1, 1, 1, 3], "bias"),
    ] {
        refused(run(x, weight, bias), Status::Shape, words);
    }
}

#[test]
fn steps_without_tokens_give_nothing() {
    let mut tensors = inputs();
    for tensor in &mut tensors {
        let mut shape = *tensor.shape();
        shape[2] = 0;
        *tensor = Tensor::new(shape, Vec::<f32>::new()).unwrap();
    }
    let [q, k, v, g, _] = &tensors;
    let inputs = ScanInputs { q, k, v, g, beta: None };
    let spec = spec(RecurrentPlan::default());
    let mut workspace = Workspace::new();
    let (out, rows) = scan(&SCAN, &inputs, &spec, None, &mut workspace, &Serial).unwrap();
    assert_eq!(out.shape(), &[1, 2, 0, 6]);
    assert_eq!(rows.rows[1].as_ref().map(Tensor::shape), Some(&[1, 2, 0, 7]));
    assert!(rows.anchors.is_none());
}

/// Inputs in float16 or with other strides are converted to float32, and outputs are rounded.
#[test]
fn dtypes_and_strides_do_not_matter() {
    let spec = spec(plan());
    let halves = inputs().map(|tensor| {
        let values = tensor.to_f32().into_iter().map(f16::from_f32).collect::<Vec<_>>();
        Tensor::new(*tensor.shape(), values).unwrap()
    });
    let values = halves.each_ref().map(Tensor::to_f32);
    // The elements are in memory in the reverse order of axes.
    let turned: Vec<Vec<f32>> = halves
        .iter()
        .zip(&values)
        .map(|(tensor, values)| {
            let [_, heads, n, dim] = tensor.shape().map(|size| size as usize);
            let places = (0..dim).flat_map(|d| (0..n).map(move |t| (d, t)));
            let places = places.flat_map(|(d, t)| (0..heads).map(move |h| (h * n + t) * dim + d));
            places.map(|at| values[at]).collect()
        })
        .collect();
    let strided = std::array::from_fn(|i| {
        let shape = *halves[i].shape();
        let strides = [0, 1, shape[1] as isize, (shape[1] * shape[2]) as isize];
        let start = turned[i].as_ptr().cast();
        // SAFETY: the vector outlives the tensor and has these elements.
        unsafe { Tensor::borrowed(start, Dtype::F32, shape, strides) }.unwrap()
    });
    let expected = run(&strided, &spec, Dtype::F32).unwrap().to_f32();
    assert_eq!(run(&halves, &spec, Dtype::F32).unwrap().to_f32(), expected);
    let rounded: Vec<f32> = expected.iter().map(|&x| f16::from_f32(x).to_f32()).collect();
    assert_eq!(run(&halves, &spec, Dtype::F16).unwrap().to_f32(), rounded);
    let rounded: Vec<f32> = expected.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
    assert_eq!(run(&halves, &spec, Dtype::Bf16).unwrap().to_f32(), rounded);
}
