//! A layer of experts with generated weights, and its outputs in plain loops.

use half::bf16;

use crate::experts::activation::{Activation, Function};
use crate::experts::run::Inputs;
use crate::experts::sizes::Experts;
use crate::linear::weights::{WeightFormat, ROWS};

/// Random numbers.
pub struct Numbers(pub u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Returns a number from -1 to 1.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }
}

/// One product's weights: packed, and as numbers `[experts, rows, columns]` in the packed order of rows.
pub struct Weights {
    memory: Vec<u64>,
    size: usize,
    values: Vec<f32>,
    rows: usize,
    columns: usize,
}

impl Weights {
    pub fn new(
        format: WeightFormat,
        n_experts: usize,
        rows: usize,
        columns: usize,
        numbers: &mut Numbers,
    ) -> Self {
        let tiles = rows.div_ceil(ROWS);
        let mut values = vec![0.0; n_experts * tiles * ROWS * columns];
        let mut bytes = Vec::new();
        for tile in values.chunks_exact_mut(ROWS * columns) {
            match format {
                WeightFormat::F32 | WeightFormat::Bf16 => {
                    for column in 0..columns {
                        for row in 0..ROWS {
                            let value = bf16::from_f32(numbers.float());
                            tile[row * columns + column] = value.to_f32();
                            match format {
                                WeightFormat::F32 => bytes.extend(value.to_f32().to_le_bytes()),
                                _ => bytes.extend(value.to_le_bytes()),
                            }
                        }
                    }
                }
                WeightFormat::Int8 { group } => pack(tile, columns, group, 8, &mut bytes, numbers),
                WeightFormat::Int4 { group } => pack(tile, columns, group, 4, &mut bytes, numbers),
            }
        }
        let mut memory = vec![0u64; bytes.len().div_ceil(8)];
        // SAFETY: the memory has as many bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.as_mut_ptr().cast(), bytes.len());
        }
        Self { memory, size: bytes.len(), values, rows: tiles * ROWS, columns }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory has as many bytes.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.size) }
    }

    pub fn row(&self, expert: usize, row: usize) -> &[f32] {
        &self.values[(expert * self.rows + row) * self.columns..][..self.columns]
    }
}

/// Appends a tile of random codes, and notes their values.
fn pack(
    tile: &mut [f32],
    columns: usize,
    group: usize,
    bits: usize,
    bytes: &mut Vec<u8>,
    numbers: &mut Numbers,
) {
    let offset = 1i32 << (bits - 1);
    for first in (0..columns).step_by(group) {
        let scales: Vec<bf16> =
            (0..ROWS).map(|_| bf16::from_f32(numbers.float() / offset as f32)).collect();
        bytes.extend(scales.iter().flat_map(|scale| scale.to_le_bytes()));
        let mut codes = vec![[0u8; ROWS]; group];
        for (at, codes) in codes.iter_mut().enumerate() {
            for (row, code) in codes.iter_mut().enumerate() {
                *code = numbers.below(1 << bits) as u8;
                tile[row * columns + first + at] =
                    scales[row].to_f32() * (i32::from(*code) - offset) as f32;
            }
        }
        for eight in codes.chunks_exact(8) {
            let (low, high) = eight.split_at(4);
            let quads = |half: &[[u8; ROWS]]| -> Vec<u8> {
                (0..4 * ROWS).map(|at| half[at % 4][at / 4]).collect()
            };
            let (low, high) = (quads(low), quads(high));
            match bits {
                4 => bytes.extend(low.iter().zip(high).map(|(low, high)| low | high << 4)),
                _ => bytes.extend([low, high].concat()),
            }
        }
    }
}

/// Returns numbers that are rounded to 8 bits in groups.
pub fn rounded(x: &[f64], format: WeightFormat) -> Vec<f64> {
    let Some(group) = format.group() else { return x.to_vec() };
    let mut made = Vec::new();
    for x in x.chunks_exact(group) {
        let most = x.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        made.extend(x.iter().map(|x| match most {
            0.0 => 0.0,
            _ => (x * 127.0 / most).round_ties_even() * most / 127.0,
        }));
    }
    made
}

/// A layer with random weights.
pub struct Layer {
    pub experts: Experts,
    pub first: Weights,
    pub second: Weights,
    pub biases: Option<[Vec<f32>; 2]>,
}

impl Layer {
    pub fn new(experts: Experts, has_bias: bool, numbers: &mut Numbers) -> Self {
        let Experts { n_experts, hidden, intermediate, weights, activation } = experts;
        let rows = intermediate * if activation.gated { 2 } else { 1 };
        let first = Weights::new(weights, n_experts, rows, hidden, numbers);
        let second = Weights::new(weights, n_experts, hidden, intermediate, numbers);
        let biases = has_bias.then(|| [rows, hidden].map(|rows| numbers.floats(n_experts * rows)));
        Self { experts, first, second, biases }
    }

    pub fn inputs<'a>(
        &'a self,
        x: &'a [f32],
        k: usize,
        indices: &'a [u8],
        factors: &'a [f32],
    ) -> Inputs<'a> {
        let bias = |at: usize| self.biases.as_ref().map(|biases| &biases[at][..]);
        Inputs {
            x,
            k,
            experts: indices,
            routing_weights: factors,
            first: self.first.bytes(),
            second: self.second.bytes(),
            first_bias: bias(0),
            second_bias: bias(1),
        }
    }

    /// Returns the outputs in float64.
    pub fn outputs(&self, x: &[f32], k: usize, chosen: &[i64], factors: &[f32]) -> Vec<f64> {
        let Experts { hidden, intermediate, weights, activation, .. } = self.experts;
        let mut made = vec![0.0; x.len()];
        for (pair, (&expert, &factor)) in chosen.iter().zip(factors).enumerate() {
            let (expert, token) = (expert as usize, pair / k);
            let row: Vec<f64> =
                x[token * hidden..][..hidden].iter().map(|&x| f64::from(x)).collect();
            let row = rounded(&row, weights);
            let first = |row_at: usize| {
                let bias = self
                    .biases
                    .as_ref()
                    .map_or(0.0, |biases| biases[0][expert * self.first.rows + row_at]);
                dot(self.first.row(expert, row_at), &row) + f64::from(bias)
            };
            let between: Vec<f64> = (0..intermediate)
                .map(|at| {
                    if activation.gated {
                        let gate = at / ROWS * 2 * ROWS + at % ROWS;
                        gated(&activation, first(gate), first(gate + ROWS))
                    } else {
                        function(&activation, first(at))
                    }
                })
                .collect();
            let between = rounded(&between, weights);
            for at in 0..hidden {
                let bias =
                    self.biases.as_ref().map_or(0.0, |biases| biases[1][expert * hidden + at]);
                let sum = dot(self.second.row(expert, at), &between) + f64::from(bias);
                made[token * hidden + at] += f64::from(factor) * sum;
            }
        }
        made
    }
}

fn dot(weights: &[f32], x: &[f64]) -> f64 {
    weights.iter().zip(x).map(|(weight, x)| f64::from(*weight) * x).sum()
}

fn gated(activation: &Activation, gate: f64, up: f64) -> f64 {
    let limit = f64::from(activation.limit);
    function(activation, gate.min(limit)) * (up.clamp(-limit, limit) + f64::from(activation.offset))
}

pub fn function(activation: &Activation, x: f64) -> f64 {
    use std::f64::consts::PI;
    match activation.function {
        Function::Silu => x / (1.0 + (-f64::from(activation.alpha) * x).exp()),
        Function::Gelu => 0.5 * x * erfc(-x / 2f64.sqrt()),
        Function::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Function::Relu => x.max(0.0),
        Function::Relu2 => x.max(0.0).powi(2),
    }
}

/// Returns the complementary error function, from the series of the error function near zero and a continued
/// fraction elsewhere.
fn erfc(x: f64) -> f64 {
    if x < 0.0 {
        return 2.0 - erfc(-x);
    }
    if x < 2.5 {
        let (mut term, mut sum) = (x, x);
        for n in 1..100 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        return 1.0 - sum * 2.0 / std::f64::consts::PI.sqrt();
    }
    let fraction = (1..60).rev().fold(0.0, |tail, n| f64::from(n) / 2.0 / (x + tail));
    (-x * x).exp() / std::f64::consts::PI.sqrt() / (x + fraction)
}
