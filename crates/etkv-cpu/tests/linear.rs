//! Calls of products and of embeddings, made in the same way as by ExecuTorch's delegates.

#![allow(clippy::panic, clippy::unwrap_used)]

#[allow(dead_code)] // Other tests use the other items.
mod calls;
mod damage;
mod refused;

use calls::{bytes, FLOAT, LONG};
use etkv_core::{Error, Result, Status};
use etkv_cpu::program::Call;
use etkv_cpu::Serial;
use etkv_delegate::{Argument, Host, LoadOptions};
use refused::refused;

const BYTE: i8 = 0;

/// Two matrices with 4 columns: one of 3 rows, with a bias, and one of 17 rows.
const LINEAR: &str = r#"{"op": "linear", "columns": 4, "weights": "float32", "group_size": 0, "rows": [3, 17],
    "version": 1, "inputs": [0, 1, 3, 2, null]}"#;

const EMBEDDING: &str = r#"{"op": "embedding", "rows": 17, "width": 4, "weights": "float32", "group_size": 0,
    "version": 1, "inputs": [0, 1]}"#;

/// A host that keeps the outputs of a call. With `one_memory`, all outputs get the same memory.
#[derive(Default)]
struct Outputs {
    shapes: Vec<Vec<i32>>,
    memory: Vec<Vec<f32>>,
    one_memory: bool,
}

impl Host for Outputs {
    fn place(&mut self, index: usize, shape: &[i32], n_bytes: usize) -> Result<&mut [u8]> {
        assert_eq!(index, self.shapes.len());
        if n_bytes > 4096 {
            return Err(Error::new(Status::Shape, "no room"));
        }
        self.shapes.push(shape.to_vec());
        if !self.one_memory || index == 0 {
            self.memory.push(vec![0.0; 1024]);
        }
        let memory = self.memory.last_mut().unwrap();
        // SAFETY: floats have no invalid bytes, and every bit pattern is a float.
        let all = unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast::<u8>(), 4096) };
        Ok(&mut all[..n_bytes])
    }

    fn set_integer(&mut self, _: usize, _: i64) -> Result<()> {
        panic!("an output is an integer");
    }
}

fn load(payload: &str) -> Result<Call> {
    Call::load(payload.as_bytes(), &LoadOptions::default())
}

/// Returns packed float32 weights of `tiles` tiles. Row `r` has `r` in column 0 and 1 in column 3.
fn weights(tiles: usize) -> Vec<f32> {
    let mut made = vec![0.0; tiles * 4 * 16];
    for row in 0..tiles * 16 {
        made[(row / 16 * 4) * 16 + row % 16] = row as f32;
        made[(row / 16 * 4 + 3) * 16 + row % 16] = 1.0;
    }
    made
}

/// Makes a call of products, after `change` has modified the arguments.
fn multiply(payload: &str, host: &mut Outputs, change: impl Fn(&mut [Argument; 4])) -> Result<()> {
    let mut call = load(payload)?;
    let (x, first, second) = ([1.0, 0.0, 0.0, 2.0, 0.0, 5.0, 6.0, 0.5], weights(1), weights(2));
    let mut inputs = [
        Argument::tensor(FLOAT, &[1, 2, 4], bytes(&x)),
        Argument::tensor(FLOAT, &[1, 4, 16], bytes(&first)),
        Argument::tensor(FLOAT, &[2, 4, 16], bytes(&second)),
        Argument::tensor(FLOAT, &[3], bytes(&[10.0, 20.0, 30.0])),
    ];
    change(&mut inputs);
    let types = vec![FLOAT; call.n_outputs()];
    let n = call.n_inputs().min(4);
    call.execute(&inputs[..n], &types, host, &Serial)
}

#[test]
fn products_of_one_input() {
    let mut host = Outputs::default();
    multiply(LINEAR, &mut host, |_| {}).unwrap();
    assert_eq!(host.shapes, [vec![1, 2, 3], vec![1, 2, 17]]);
    assert_eq!(host.memory[0][..6], [12.0, 23.0, 34.0, 10.5, 20.5, 30.5]);
    let expected: Vec<f32> = (0..17).map(|row| row as f32 + 2.0).collect();
    assert_eq!(host.memory[1][..17], expected);
    assert_eq!(host.memory[1][17..35], [&[0.5; 17][..], &[0.0]].concat());
}

/// The name of a format determines the type of the scales, and with it the size of the weights.
#[test]
fn scales_of_integers() {
    let payload = r#"{"op": "linear", "columns": 32, "weights": "int4", "group_size": 32, "rows": [16],
        "version": 1, "inputs": [0, 1, null]}"#;
    // The value of code 9 is 1.
    let codes = [0x99u8; 16 * 16];
    let mut x = [0.0; 32];
    x[5] = 127.0;
    let run = |name: &str, scales: Vec<u8>| {
        let mut call = load(&payload.replacen("int4", name, 1))?;
        let weights = [&scales[..], &codes].concat();
        let shape = [1, 1, weights.len() as i32];
        let inputs = [
            Argument::tensor(FLOAT, &[1, 32], bytes(&x)),
            Argument::tensor(BYTE, &shape, &weights),
        ];
        let mut host = Outputs::default();
        call.execute(&inputs, &[FLOAT], &mut host, &Serial).map(|()| host.memory[0][0] / 127.0)
    };
    // 0x3555 is about 1/3 in float16, but another number in bfloat16.
    let third = f32::from_bits(0x3eaa_a000);
    assert_eq!(run("int4_float16", [0x55, 0x35].repeat(16)).unwrap(), third);
    assert_eq!(run("int4", [0xaa, 0x3e].repeat(16)).unwrap(), f32::from_bits(0x3eaa_0000));
    assert_eq!(run("int4_float32", third.to_le_bytes().repeat(16)).unwrap(), third);
    // With a bias, a weight is the code 9 times the scale, plus 2.
    let biased = [0x55, 0x35].repeat(16).into_iter().chain([0x00, 0x40].repeat(16)).collect();
    assert_eq!(run("int4_float16_biased", biased).unwrap(), 9.0 * third + 2.0);
    // The code 9 is the float -0.5.
    assert_eq!(run("fp4", [0xaa, 0x3e].repeat(16)).unwrap(), -f32::from_bits(0x3eaa_0000));
    refused(run("int4_nested", vec![0; 96]), Status::Program, "a multiple of 8, got 1");
    let told = "weights: expected 320 numbers or bytes, got 288";
    refused(run("int4_float32", [0x55, 0x35].repeat(16)), Status::Shape, told);
}

#[test]
fn rows_of_an_embedding() {
    let (mut call, table) = (load(EMBEDDING).unwrap(), weights(2));
    let mut run = |ids: &[i64], scalar_type| {
        let ids: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let shape = [1, ids.len() as i32 / 8];
        let inputs = [
            Argument::tensor(scalar_type, &shape, &ids),
            Argument::tensor(FLOAT, &[2, 4, 16], bytes(&table)),
        ];
        let mut host = Outputs::default();
        call.execute(&inputs, &[FLOAT], &mut host, &Serial).map(|()| host)
    };
    let host = run(&[16, 0, 3], LONG).unwrap();
    assert_eq!(host.shapes, [[1, 3, 4]]);
    assert_eq!(host.memory[0][..12], [16.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 3.0, 0.0, 0.0, 1.0]);
    let told = "an embedding: ids: expected 0 to 16, got 17";
    refused(run(&[1, 17], LONG), Status::InvalidArgument, told);
    refused(run(&[1], FLOAT), Status::Dtype, "ids: expected int64");
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    static ZEROS: [u64; 256] = [0; 256];
    // SAFETY: zeros are valid bytes.
    let zeros = unsafe { std::slice::from_raw_parts(ZEROS.as_ptr().cast::<u8>(), 2048) };
    let tensor = |scalar_type, shape, n: usize| Argument::tensor(scalar_type, shape, &zeros[..n]);
    for (at, argument, status, told) in [
        (0, tensor(FLOAT, &[2, 5], 40), Status::Shape, "input: expected rows of 4, got 5"),
        (0, tensor(LONG, &[2, 4], 64), Status::Dtype, "input: expected a tensor in float32"),
        (0, Argument::of(3), Status::Shape, "input: expected [.., 4]"),
        (1, tensor(BYTE, &[1, 4, 16], 64), Status::Dtype, "weights: expected ExecuTorch's type 6"),
        (1, tensor(FLOAT, &[1, 4, 8], 128), Status::Shape, "weights: expected 256"),
        (2, tensor(FLOAT, &[1, 4, 16], 256), Status::Shape, "weights: expected 512"),
        (3, tensor(FLOAT, &[4], 16), Status::Shape, "bias: expected 3"),
        (
            1,
            Argument::tensor(FLOAT, &[64], &zeros[1..257]),
            Status::Shape,
            "weights: expected an address that is a multiple of 4",
        ),
    ] {
        let change = |inputs: &mut [Argument; 4]| inputs[at] = argument;
        let told = format!("a linear layer: {told}");
        refused(multiply(LINEAR, &mut Outputs::default(), change), status, &told);
    }
    let mut host = Outputs { one_memory: true, ..Outputs::default() };
    refused(multiply(LINEAR, &mut host, |_| {}), Status::Shape, "two of them overlap");
}

#[test]
fn damaged_payloads_are_refused() {
    for (payload, from, to, told) in [
        (LINEAR, "\"columns\": 4", "\"columns\": 0", "width of rows: expected 1 to"),
        (LINEAR, "[3, 17]", "[3, 99999999999]", "rows: expected 1 to"),
        (LINEAR, "[3, 17]", "[3]", "expected 3 inputs of 1 products, got 5"),
        (LINEAR, "[3, 17]", "[]", "a matrix at least"),
        (LINEAR, "2, null]", "5, null]", "from 0 to 4"),
        (LINEAR, "[0, 1, 3", "[0, null, 3", "input 1 of a call is absent"),
        (LINEAR, "float32", "float16", "unknown variant `float16`"),
        (LINEAR, "size\": 0", "size\": 32", "group size: expected 0 for weights in floats, got 32"),
        (
            EMBEDDING,
            "size\": 0",
            "size\": 4",
            "group size: expected 0 for weights in floats, got 4",
        ),
        (LINEAR, "float32", "int4_float64", "unknown variant `int4_float64`"),
        (LINEAR, "float32", "int8_float16", "group size: expected a multiple of 32"),
        (EMBEDDING, "\"rows\": 17", "\"rows\": 0", "rows: expected 1 to"),
        (EMBEDDING, "[0, 1]", "[0, 2]", "from 0 to 1"),
        (EMBEDDING, "\"width\": 4, ", "", "missing field `width`"),
    ] {
        let text = payload.replacen(from, to, 1);
        assert_ne!(text, payload);
        refused(load(&text), Status::Program, told);
    }
}

/// Payloads with random damage are loaded or refused. Loaded ones run or refuse their arguments.
#[test]
fn random_damage() {
    damage::check(LINEAR, |text| multiply(text, &mut Outputs::default(), |_| {}));
}
