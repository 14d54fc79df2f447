//! Inputs and plans that are refused.

use std::sync::Arc;

use etkv_core::bookkeeping::{AnchorSource, Chain, RecurrentPlan, RowSource, Slots};
use mlx_rs::{Array, Dtype};

use super::{Convolution, Recurrence};
use crate::error::{Error, Status};
use crate::recurrent::{convolve, scan, Activation, RecurrentSpec, ScanInputs};

const RECURRENCE: Recurrence = Recurrence {
    k_heads: 1,
    heads: 2,
    k_dim: 4,
    v_dim: 6,
    channel_decay: false,
    delta: true,
    repeats: false,
    decay: 0.1,
};

fn spec(change: impl FnOnce(&mut Chain)) -> RecurrentSpec {
    let mut chain = Chain {
        tokens: 0..2,
        position: 0,
        rows: Vec::new(),
        anchor: AnchorSource::Zero,
        base: 0,
        folds: 0..0,
    };
    change(&mut chain);
    let plan = RecurrentPlan {
        chains: vec![chain],
        stored: vec![0, 1],
        rows: Slots::Run(0..2),
        ..RecurrentPlan::default()
    };
    RecurrentSpec { rows: [None, None], anchors: None, plan: Arc::new(plan) }
}

fn refused(change: impl FnOnce(&mut Chain)) -> Error {
    crate::mlx::run(|| {
        let arrays = RECURRENCE.arrays(&[1, 2])?;
        scan(&RECURRENCE.scan_inputs(&arrays), 1.0, &spec(change), None).map(|_| ())
    })
    .unwrap_err()
}

#[test]
fn plans_with_invalid_indices_are_refused() {
    let changes: [fn(&mut Chain); 6] = [
        |chain| chain.rows = vec![RowSource::Token(1)],
        |chain| chain.tokens = 1..2,
        |chain| (chain.position, chain.rows) = (1, vec![RowSource::Slot(5)]),
        |chain| chain.position = 3,
        |chain| chain.anchor = AnchorSource::Slot(0),
        |chain| chain.anchor = AnchorSource::Fold(0),
    ];
    for change in changes {
        assert_eq!(refused(change).status(), Status::Internal);
    }
}

#[test]
fn inputs_of_other_shapes_are_refused() {
    let error = crate::mlx::run(|| {
        let arrays = RECURRENCE.arrays(&[1, 2])?;
        let other = RECURRENCE.arrays(&[1, 2, 3])?;
        let inputs = RECURRENCE.scan_inputs(&arrays);
        let changed = [
            ScanInputs { q: &other[0], ..inputs },
            ScanInputs { v: &arrays[1], ..inputs },
            ScanInputs { g: &arrays[0], ..inputs },
            ScanInputs { beta: Some(&other[4]), ..inputs },
        ];
        for inputs in changed {
            let error = scan(&inputs, 1.0, &spec(|_| ()), None).unwrap_err();
            assert_eq!(error.status(), Status::Shape, "{error}");
        }
        let convolution =
            Convolution { channels: 3, width: 2, bias: false, activation: Activation::None };
        let arrays = convolution.arrays(&[1, 2]);
        let mut inputs = convolution.convolve_inputs(&arrays);
        let weight = Array::ones::<f32>(&[4, 2])?;
        inputs.weight = &weight;
        convolve(&inputs, &spec(|_| ()), None).map(|_| ())
    })
    .unwrap_err();
    assert_eq!(error.message(), "expected columns of shape [1, 4, 2], got [1, 3, 2]");
}

#[test]
fn results_have_the_requested_dtype() {
    crate::mlx::run(|| {
        let arrays = RECURRENCE.arrays(&[1, 2])?;
        let halves = arrays.each_ref().map(|array| array.as_dtype(Dtype::Bfloat16));
        let [q, k, v, g, beta] = halves;
        let halves = [q?, k?, v?, g?, beta?];
        let inputs = RECURRENCE.scan_inputs(&halves);
        let (out, rows) = scan(&inputs, 1.0, &spec(|_| ()), None)?;
        assert_eq!((out.dtype(), out.shape()), (Dtype::Bfloat16, &[1, 2, 2, 6][..]));
        assert_eq!(rows.rows[0].as_ref().unwrap().dtype(), Dtype::Float32);
        let (out, _) = scan(&inputs, 1.0, &spec(|_| ()), Some(Dtype::Float32))?;
        assert_eq!(out.dtype(), Dtype::Float32);
        Ok(())
    })
    .unwrap();
}
