//! Refused calls, which must not change the output.

use etkv_core::Status;

use super::reference::Layer;
use super::swiglu;
use crate::attention::synthetic::Random;
use crate::experts::activation::{Activation, Function};
use crate::experts::run::{route_into, Inputs};
use crate::experts::sizes::Experts;
use crate::experts::workspace::Workspace;
use crate::linear::{Scales, WeightFormat};
use crate::parallel::Serial;
use crate::refused::refused;

const EXPERTS: Experts = Experts {
    n_experts: 3,
    hidden: 32,
    intermediate: 32,
    weights: [WeightFormat::Int4 { group: 32, scales: Scales::Bf16 }; 2],
    activation: Activation {
        function: Function::Silu,
        gated: true,
        alpha: 1.0,
        limit: f32::INFINITY,
        offset: 0.0,
    },
};

#[test]
fn inputs_that_do_not_fit() {
    let layer = Layer::new(EXPERTS, true, &mut Random::new(7));
    let (x, factors) = (vec![1.0; 2 * 32], vec![0.5; 4]);
    let good: Vec<u8> = [0i64, 1, 2, 0].iter().flat_map(|at| at.to_le_bytes()).collect();
    let bad: Vec<u8> = [0i64, 1, 3, 0].iter().flat_map(|at| at.to_le_bytes()).collect();
    let inputs = layer.inputs(&x, 2, &good, &factors);
    let unwritten = |inputs: Inputs, told: &str, status| {
        let mut out = vec![7.0; 64];
        let done = route_into(&EXPERTS, &inputs, &mut out, &mut Workspace::default(), &Serial);
        refused(done, status, told);
        assert!(out.iter().all(|&x| x == 7.0));
    };
    let first = inputs.first;
    for (inputs, told) in [
        (Inputs { x: &x[1..], ..inputs }, "hidden states: expected 32 numbers or bytes, got 63"),
        (Inputs { k: 3, ..inputs }, "experts of the tokens"),
        (Inputs { experts: &good[1..], ..inputs }, "experts of the tokens"),
        (Inputs { routing_weights: &factors[1..], ..inputs }, "factors: expected 4"),
        (Inputs { first: &first[1..], ..inputs }, "weights of the first products"),
        (Inputs { second: first, ..inputs }, "weights of the second products"),
        (Inputs { first_bias: Some(&factors), ..inputs }, "biases of the first products"),
        (Inputs { second_bias: Some(&[]), ..inputs }, "biases of the second products"),
    ] {
        unwritten(inputs, told, Status::Shape);
    }
    let told = "indices from 0 to 2, got 3 for token 1";
    unwritten(Inputs { experts: &bad, ..inputs }, told, Status::InvalidArgument);
}

#[test]
fn sizes_that_no_exporter_writes() {
    let activation = |limit, offset, gated| Activation { limit, offset, gated, ..swiglu() };
    let int8 = |group| WeightFormat::Int8 { group, scales: Scales::Bf16 };
    let factor = |function, gated| Activation { function, gated, alpha: 3.0, ..swiglu() };
    for (experts, told) in [
        (Experts { n_experts: 0, ..EXPERTS }, "experts: expected 1 to"),
        (Experts { hidden: usize::MAX, ..EXPERTS }, "hidden: expected 1 to"),
        (Experts { intermediate: 24, ..EXPERTS }, "a multiple of 16, got 24"),
        (Experts { intermediate: 48, ..EXPERTS }, "does not divide"),
        (Experts { hidden: 48, ..EXPERTS }, "does not divide"),
        (Experts { weights: [int8(0); 2], ..EXPERTS }, "group size"),
        (Experts { weights: [int8(48); 2], ..EXPERTS }, "group size"),
        (Experts { weights: [int8(32), int8(512)], ..EXPERTS }, "group size"),
        (Experts { activation: activation(0.0, 0.0, true), ..EXPERTS }, "a limit above 0"),
        (Experts { activation: activation(f32::NAN, 0.0, true), ..EXPERTS }, "a limit above 0"),
        (Experts { activation: activation(1.0, f32::NAN, true), ..EXPERTS }, "a finite alpha"),
        (Experts { activation: activation(1.0, 0.0, false), ..EXPERTS }, "without a gate"),
        (Experts { activation: factor(Function::Gelu, true), ..EXPERTS }, "alpha is 3"),
        (Experts { activation: factor(Function::Silu, false), ..EXPERTS }, "alpha is 3"),
    ] {
        refused(experts.check(), Status::Program, told);
    }
    EXPERTS.check().unwrap();
}
