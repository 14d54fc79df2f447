//! A loaded method with two attention layers. The tests run its calls through the interface that ExecuTorch's
//! delegates use.

#![allow(clippy::panic, clippy::unwrap_used)]

use etkv_core::{Error, Result, Status};
use etkv_cpu::program::Call;
use etkv_cpu::Serial;
use etkv_delegate::{Argument, Host, LoadOptions};

/// The elements of a row.
pub const DIM: usize = 8;
/// ExecuTorch's numbers for dtypes.
pub const FLOAT: i8 = 6;
pub const LONG: i8 = 4;

/// A host that keeps the output of a call, or refuses it.
#[derive(Default)]
pub struct Taker {
    pub shape: Vec<i32>,
    pub values: Vec<f32>,
    pub refuses: bool,
}

impl Host for Taker {
    fn place(&mut self, index: usize, shape: &[i32], n_bytes: usize) -> Result<&mut [u8]> {
        assert_eq!(index, 0);
        if self.refuses {
            return Err(Error::new(Status::Shape, "no room"));
        }
        self.shape = shape.to_vec();
        self.values = vec![0.0; n_bytes / 4];
        Ok(bytes_mut(&mut self.values))
    }

    fn set_integer(&mut self, _: usize, _: i64) -> Result<()> {
        panic!("an output is an integer");
    }
}

fn bytes_mut(values: &mut [f32]) -> &mut [u8] {
    // SAFETY: floats have no invalid bytes, and every bit pattern is a float.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// Returns the payload of an attention call.
pub fn attend_payload(program: &str, call: usize, n_calls: usize) -> String {
    format!(
        r#"{{"op": "update_and_attend", "version": 1, "program": "{program}", "call": {call},
            "n_calls": {n_calls}, "n_layers": {n_calls}, "layer": {call}, "scale": 0.5,
            "inputs": [0, 1, 2, 3], "logits": "selected"}}"#
    )
}

/// A loaded method of two layers, each with one query head and one KV head.
pub struct Method(pub Vec<Call>);

impl Method {
    pub fn load(program: &str, key: &str) -> Self {
        let load = |call| {
            Call::load(
                attend_payload(program, call, 2).as_bytes(),
                &LoadOptions::parse(key, "all", "", "").unwrap(),
            )
        };
        Self((0..2).map(|call| load(call).unwrap()).collect())
    }

    /// Makes one call, with rows that are computed from the positions. The host gets the output.
    pub fn call(&mut self, call: usize, positions: &[i64], host: &mut dyn Host) -> Result<()> {
        let rows = |add: f32| -> Vec<f32> {
            let row = |&at: &i64| (0..DIM).map(move |i| (at as f32 + add) * 0.1 + i as f32 * 0.01);
            positions.iter().flat_map(row).collect()
        };
        let (q, k, v) = (rows(1.0), rows(2.0), rows(3.0 + call as f32));
        let shape = [1, 1, positions.len() as i32, DIM as i32];
        let (q, k, v) = (bytes(&q), bytes(&k), bytes(&v));
        let at: Vec<u8> = positions.iter().flat_map(|at| at.to_ne_bytes()).collect();
        let at_shape = [positions.len() as i32, 1];
        let inputs = [
            Argument::tensor(FLOAT, &shape, q),
            Argument::tensor(FLOAT, &shape, k),
            Argument::tensor(FLOAT, &shape, v),
            Argument::tensor(LONG, &at_shape, &at),
        ];
        self.0[call].execute(&inputs, &[FLOAT], host, &Serial)
    }

    /// Runs a forward. Returns the output of its last layer.
    pub fn forward(&mut self, positions: &[i64]) -> Result<Vec<f32>> {
        let mut host = Taker::default();
        self.call(0, positions, &mut host)?;
        self.call(1, positions, &mut host)?;
        assert_eq!(host.shape, [1, 1, positions.len() as i32, DIM as i32]);
        Ok(host.values)
    }
}

/// Returns the bytes of floats.
pub fn bytes(values: &[f32]) -> &[u8] {
    // SAFETY: every bit pattern is valid as bytes.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}
