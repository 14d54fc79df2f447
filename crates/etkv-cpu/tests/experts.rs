//! Calls of mixtures of experts, made in the same way as by ExecuTorch's delegates.

#![allow(clippy::panic, clippy::unwrap_used)]

#[allow(dead_code)] // Other tests use the other items.
mod calls;
mod damage;
mod refused;

use calls::{bytes, Taker, FLOAT, LONG};
use etkv_core::{Result, Status};
use etkv_cpu::program::Call;
use etkv_cpu::Serial;
use etkv_delegate::{Argument, LoadOptions};
use refused::refused;

const BYTE: i8 = 0;
const BFLOAT16: i8 = 15;

/// Two experts without a gate, with 4 elements and 16 intermediate elements.
const PAYLOAD: &str = r#"{"op": "routed_experts", "n_experts": 2, "hidden": 4, "intermediate": 16,
    "weights": "float32", "group_size": 0, "activation": "relu", "gated": false, "alpha": 1.0, "limit": null,
    "offset": 0.0, "version": 1, "inputs": [0, 1, 2, 3, 4, 5, null]}"#;

fn load(payload: &str) -> Result<Call> {
    Call::load(payload.as_bytes(), &LoadOptions::default())
}

/// The tensors of a call. The first product of expert `e` copies the elements, multiplied by `e + 1`. The
/// second product copies them back.
struct Tensors {
    x: Vec<f32>,
    experts: Vec<i64>,
    factors: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
    bias: Vec<f32>,
}

impl Tensors {
    fn new() -> Self {
        let mut first = vec![0.0; 2 * 4 * 16];
        let mut second = vec![0.0; 2 * 16 * 16];
        for expert in 0..2 {
            for at in 0..4 {
                first[(expert * 4 + at) * 16 + at] = (expert + 1) as f32;
                second[(expert * 16 + at) * 16 + at] = 1.0;
            }
        }
        Self {
            x: vec![1.0, -2.0, 3.0, 4.0, 5.0, 6.0, -7.0, 8.0],
            experts: vec![0, 1, 1, 1],
            factors: vec![0.5, 0.25, 1.0, 2.0],
            first,
            second,
            bias: (0..32).map(|at| if at == 16 { 10.0 } else { 0.0 }).collect(),
        }
    }

    /// Makes a call, after `change` has modified the arguments.
    fn call(&self, call: &mut Call, change: impl Fn(&mut [Argument; 6])) -> Result<Vec<f32>> {
        let experts: Vec<u8> =
            self.experts.iter().flat_map(|expert| expert.to_le_bytes()).collect();
        let mut inputs = [
            Argument::tensor(FLOAT, &[2, 4], bytes(&self.x)),
            Argument::tensor(LONG, &[2, 2], &experts),
            Argument::tensor(FLOAT, &[2, 2], bytes(&self.factors)),
            Argument::tensor(FLOAT, &[2, 1, 4, 16], bytes(&self.first)),
            Argument::tensor(FLOAT, &[2, 1, 16, 16], bytes(&self.second)),
            Argument::tensor(FLOAT, &[2, 16], bytes(&self.bias)),
        ];
        change(&mut inputs);
        let n = call.n_inputs().min(6);
        let mut host = Taker::default();
        call.execute(&inputs[..n], &[FLOAT], &mut host, &Serial)?;
        Ok(host.values)
    }
}

#[test]
fn outputs_are_sums_over_the_experts_of_a_token() {
    let mut call = load(PAYLOAD).unwrap();
    assert_eq!(call.n_inputs(), 6);
    let found = Tensors::new().call(&mut call, |_| {}).unwrap();
    // The output of token 0 is half of expert 0 plus a quarter of expert 1, which has a bias of 10 in its
    // first element. Token 1 has expert 1 twice: its output is that of expert 1, times the sum of both
    // factors.
    assert_eq!(found, [0.5 + 0.25 * 12.0, 0.0, 1.5 + 1.5, 2.0 + 2.0, 60.0, 36.0, 0.0, 48.0]);
}

#[test]
fn products_may_have_two_formats() {
    let formats = r#"["float32", "bfloat16"], "group_size": [0, 0]"#;
    let text = PAYLOAD.replacen("\"float32\", \"group_size\": 0", formats, 1);
    let tensors = Tensors::new();
    // The upper half of a float32 number is a bfloat16 number.
    let halves: Vec<u8> =
        tensors.second.iter().flat_map(|x| x.to_le_bytes().split_at(2).1.to_vec()).collect();
    let second = Argument::tensor(BFLOAT16, &[2, 1, 16, 16], halves.leak());
    let mut call = load(&text).unwrap();
    let found = tensors.call(&mut call, |inputs| inputs[4] = second).unwrap();
    assert_eq!(found, tensors.call(&mut load(PAYLOAD).unwrap(), |_| {}).unwrap());
    refused(tensors.call(&mut call, |_| {}), Status::Dtype, "weights");
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let tensors = Tensors::new();
    let mut call = load(PAYLOAD).unwrap();
    let mut refused_at = |at: usize, argument: Argument<'static>, status, told: &str| {
        refused(tensors.call(&mut call, |inputs| inputs[at] = argument), status, told);
    };
    static ZEROS: [u64; 1024] = [0; 1024];
    // SAFETY: zeros are valid bytes.
    let zeros = unsafe { std::slice::from_raw_parts(ZEROS.as_ptr().cast::<u8>(), 8192) };
    let tensor = |scalar_type, shape, n: usize| Argument::tensor(scalar_type, shape, &zeros[..n]);
    refused_at(0, tensor(FLOAT, &[8], 32), Status::Shape, "expected [T, hidden]");
    refused_at(0, tensor(FLOAT, &[1, 8], 32), Status::Shape, "rows of 4, got 8");
    refused_at(0, tensor(FLOAT, &[1, 4], 16), Status::Shape, "expected 16");
    refused_at(0, tensor(LONG, &[2, 4], 64), Status::Dtype, "hidden states");
    refused_at(0, Argument::of(3), Status::Shape, "expected [T, hidden]");
    refused_at(1, tensor(FLOAT, &[2, 2], 32), Status::Dtype, "expected int64");
    refused_at(1, tensor(LONG, &[4], 32), Status::Shape, "expected [T, k]");
    refused_at(2, tensor(FLOAT, &[2, 1], 8), Status::Shape, "factors");
    refused_at(3, tensor(BYTE, &[2, 1, 4, 16], 512), Status::Dtype, "experts: weights: expected");
    refused_at(3, tensor(FLOAT, &[2, 1, 4, 8], 256), Status::Shape, "first products");
    refused_at(4, tensor(FLOAT, &[2, 1, 16, 8], 1024), Status::Shape, "second products");
    refused_at(5, tensor(FLOAT, &[2, 8], 64), Status::Shape, "biases");
    let misaligned = Argument::tensor(FLOAT, &[2, 1, 4, 16], &zeros[1..513]);
    refused_at(3, misaligned, Status::Shape, "a multiple of 4");
    for expert in [2, -1, i64::MAX] {
        let tensors = Tensors { experts: vec![0, 1, expert, 0], ..Tensors::new() };
        let told = format!("layer of experts: experts: expected indices from 0 to 1, got {expert}");
        refused(tensors.call(&mut call, |_| {}), Status::InvalidArgument, &told);
    }
    tensors.call(&mut call, |_| {}).unwrap();
}

#[test]
fn damaged_payloads_are_refused() {
    for (from, to, told) in [
        ("\"n_experts\": 2", "\"n_experts\": 0", "experts: expected 1 to"),
        ("float32", "float16", "unknown variant `float16`"),
        ("size\": 0", "size\": [0, 32]", "group size: expected 0 for weights in floats, got 32"),
        (
            "\"float32\", \"group",
            "[\"float32\", \"int4_float64\"], \"group",
            "unknown variant `int4_float64`",
        ),
        ("\"float32\", \"group", "[\"float32\", \"int4\"], \"group", "group size"),
        ("\"float32\", \"group", "[\"float32\"], \"group", "invalid length 1"),
        ("\"group_size\": 0", "\"group_size\": [0, 1, 2]", "invalid length 3"),
        ("relu", "tanh", "unknown variant `tanh`"),
        ("\"alpha\": 1.0", "\"alpha\": 1e39", "a finite alpha"),
        ("\"hidden\": 4, ", "", "missing field `hidden`"),
        ("5, null]", "7, null]", "from 0 to 6"),
        ("[0, 1, 2", "[0, null, 2", "input 1 of a call is absent"),
    ] {
        let text = PAYLOAD.replacen(from, to, 1);
        assert_ne!(text, PAYLOAD);
        refused(load(&text), Status::Program, told);
    }
    let other = PAYLOAD.replacen("\"version\": 1", "\"version\": 2", 1);
    refused(load(&other), Status::Version, "got 2");
}

/// Payloads with random damage are loaded or refused. Loaded ones run or refuse their arguments.
#[test]
fn random_damage() {
    let tensors = Tensors::new();
    damage::check(PAYLOAD, |text| {
        load(text).and_then(|mut call| tensors.call(&mut call, |_| {})).map(|_| ())
    });
}
