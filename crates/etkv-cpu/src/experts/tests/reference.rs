//! A layer of experts with random weights. Simple loops compute its outputs in float64.

use crate::attention::synthetic::Random;
use crate::experts::activation::{Activation, Function};
use crate::experts::run::Inputs;
use crate::experts::sizes::Experts;
use crate::linear::tests::reference::{dot, rounded, Weights};
use crate::linear::weights::ROWS;

/// A layer with random weights.
pub struct Layer {
    pub experts: Experts,
    pub first: Weights,
    pub second: Weights,
    pub biases: Option<[Vec<f32>; 2]>,
}

impl Layer {
    pub fn new(experts: Experts, has_bias: bool, random: &mut Random) -> Self {
        let Experts { n_experts, hidden, intermediate, weights, activation } = experts;
        let rows = intermediate * if activation.gated { 2 } else { 1 };
        let first = Weights::new(weights[0], n_experts, rows, hidden, random);
        let second = Weights::new(weights[1], n_experts, hidden, intermediate, random);
        let biases = has_bias.then(|| [rows, hidden].map(|rows| random.numbers(n_experts * rows)));
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
            let row = rounded(&row, weights[0]);
            let first = |row_at: usize| {
                let bias = self
                    .biases
                    .as_ref()
                    .map_or(0.0, |biases| biases[0][expert * self.first.rows() + row_at]);
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
            let between = rounded(&between, weights[1]);
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

/// Returns the complementary error function: from the series of the error function near zero, and from a
/// continued fraction elsewhere.
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
