//! Compares scans and convolutions with simple loops in float64, over generated steps, forks, cuts and trees on a
//! cache.

mod refusals;
mod steps;

use mlx_rs::{Array, Dtype};

use super::{Activation, ConvolveInputs, ScanInputs};
use crate::error::Result;

/// A small random number generator.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// Returns a number from 0 to 1.
    pub fn unit(&mut self) -> f32 {
        (self.next() % (1 << 24)) as f32 / (1 << 24) as f32
    }

    /// Returns an integer below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        self.next() as usize % end
    }

    fn numbers(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit() * 2.0 - 1.0).collect()
    }
}

/// A recurrence, and the inputs of each numbered token.
#[derive(Debug, Clone, Copy)]
pub struct Recurrence {
    pub k_heads: usize,
    pub heads: usize,
    pub k_dim: usize,
    pub v_dim: usize,
    pub channel_decay: bool,
    pub delta: bool,
    /// Whether all keys are equal, write strengths are 1 and decays weak.
    pub repeats: bool,
    /// The factor of log decays.
    pub decay: f32,
}

/// The inputs of a token, each `[heads, dim]`.
struct Inputs {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    g: Vec<f32>,
    beta: Vec<f32>,
}

impl Recurrence {
    fn inputs(&self, token: u64) -> Inputs {
        let mut random = Random::new(token + 11);
        let mut q = random.numbers(self.k_heads * self.k_dim);
        let mut k = random.numbers(self.k_heads * self.k_dim);
        if self.repeats {
            k = Random::new(5).numbers(k.len());
        }
        for vector in q.chunks_mut(self.k_dim).chain(k.chunks_mut(self.k_dim)) {
            let norm = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
            vector.iter_mut().for_each(|x| *x /= norm);
        }
        let v = random.numbers(self.heads * self.v_dim);
        let n_decays = self.heads * if self.channel_decay { self.k_dim } else { 1 };
        let g = (0..n_decays).map(|_| -self.decay * random.unit()).collect();
        let beta =
            (0..self.heads).map(|_| if self.repeats { 1.0 } else { random.unit() }).collect();
        Inputs { q, k, v, g, beta }
    }

    /// Returns the arrays of these tokens: q, k, v, g, beta.
    pub fn arrays(&self, tokens: &[u64]) -> Result<[Array; 5]> {
        let inputs: Vec<Inputs> = tokens.iter().map(|&token| self.inputs(token)).collect();
        let array = |heads: usize, part: &dyn Fn(&Inputs) -> &[f32]| {
            let dim = part(&inputs[0]).len() / heads;
            let mut values: Vec<f32> = Vec::new();
            for head in 0..heads {
                inputs.iter().for_each(|of| values.extend(&part(of)[head * dim..][..dim]));
            }
            Array::from_slice(&values, &[1, heads as i32, tokens.len() as i32, dim as i32])
        };
        let g = array(self.heads, &|of| &of.g);
        Ok([
            array(self.k_heads, &|of| &of.q),
            array(self.k_heads, &|of| &of.k),
            array(self.heads, &|of| &of.v),
            if self.channel_decay { g } else { g.squeeze_axes(&[3])? },
            array(self.heads, &|of| &of.beta).squeeze_axes(&[3])?,
        ])
    }

    pub fn scan_inputs<'a>(&self, [q, k, v, g, beta]: &'a [Array; 5]) -> ScanInputs<'a> {
        ScanInputs { q, k, v, g, beta: self.delta.then_some(beta) }
    }

    /// Returns the output of the last token of a text, `[heads, v_dim]`.
    pub fn expected(&self, text: &[u64], scale: f64) -> Vec<f64> {
        let (k_dim, v_dim) = (self.k_dim, self.v_dim);
        let f64s = |row: &[f32]| row.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let inputs: Vec<Inputs> = text.iter().map(|&token| self.inputs(token)).collect();
        let mut out = Vec::new();
        for head in 0..self.heads {
            let mut state = vec![0f64; k_dim * v_dim];
            let k_head = head / (self.heads / self.k_heads);
            let mut query = Vec::new();
            for token in &inputs {
                let key = f64s(&token.k[k_head * k_dim..][..k_dim]);
                query = f64s(&token.q[k_head * k_dim..][..k_dim]);
                let mut update = f64s(&token.v[head * v_dim..][..v_dim]);
                for c in 0..k_dim {
                    let g = token.g[if self.channel_decay { head * k_dim + c } else { head }];
                    let decay = f64::from(g.max(-88.0)).exp();
                    state[c * v_dim..][..v_dim].iter_mut().for_each(|x| *x *= decay);
                }
                if self.delta {
                    for (j, u) in update.iter_mut().enumerate() {
                        let seen: f64 = (0..k_dim).map(|c| state[c * v_dim + j] * key[c]).sum();
                        *u = f64::from(token.beta[head]) * (*u - seen);
                    }
                }
                for c in 0..k_dim {
                    for j in 0..v_dim {
                        state[c * v_dim + j] += key[c] * update[j];
                    }
                }
            }
            for j in 0..v_dim {
                out.push(scale * (0..k_dim).map(|c| state[c * v_dim + j] * query[c]).sum::<f64>());
            }
        }
        out
    }
}

/// A convolution, and the inputs of each numbered token.
#[derive(Debug, Clone, Copy)]
pub struct Convolution {
    pub channels: usize,
    pub width: usize,
    pub bias: bool,
    pub activation: Activation,
}

impl Convolution {
    fn column(&self, token: u64) -> Vec<f32> {
        Random::new(token + 3).numbers(self.channels)
    }

    fn weights(&self) -> (Vec<f32>, Vec<f32>) {
        let mut random = Random::new(17);
        (random.numbers(self.channels * self.width), random.numbers(self.channels))
    }

    /// Returns the arrays of these tokens: x, weight, bias.
    pub fn arrays(&self, tokens: &[u64]) -> [Array; 3] {
        let columns: Vec<Vec<f32>> = tokens.iter().map(|&token| self.column(token)).collect();
        let (channels, width) = (self.channels as i32, self.width as i32);
        let x: Vec<f32> =
            (0..self.channels).flat_map(|c| columns.iter().map(move |column| column[c])).collect();
        let (weight, bias) = self.weights();
        [
            Array::from_slice(&x, &[1, channels, tokens.len() as i32]),
            Array::from_slice(&weight, &[channels, width]),
            Array::from_slice(&bias, &[channels]),
        ]
    }

    pub fn convolve_inputs<'a>(&self, [x, weight, bias]: &'a [Array; 3]) -> ConvolveInputs<'a> {
        let bias = self.bias.then_some(bias);
        ConvolveInputs { x, weight, bias, activation: self.activation }
    }

    /// Returns the output of the last token of a text, `[channels]`.
    pub fn expected(&self, text: &[u64]) -> Vec<f64> {
        let seen = &text[text.len().saturating_sub(self.width)..];
        let columns: Vec<Vec<f32>> = seen.iter().map(|&token| self.column(token)).collect();
        let (weight, bias) = self.weights();
        let of = |c: usize| {
            let mut sum = if self.bias { f64::from(bias[c]) } else { 0.0 };
            for (at, column) in columns.iter().rev().enumerate() {
                sum += f64::from(weight[(c + 1) * self.width - 1 - at]) * f64::from(column[c]);
            }
            match self.activation {
                Activation::None => sum,
                Activation::Silu => sum / (1.0 + (-sum).exp()),
            }
        };
        (0..self.channels).map(of).collect()
    }
}

/// Returns the elements of `[1, heads, T, dim]` or `[1, channels, T]` by token.
pub fn by_token(array: &Array) -> Result<Vec<Vec<f32>>> {
    let (heads, n) = (array.dim(1) as usize, array.dim(2) as usize);
    let flat = array.as_dtype(Dtype::Float32)?.contiguous()?;
    flat.eval()?;
    let values = flat.as_slice::<f32>();
    let dim = values.len() / heads / n;
    let row = |at: usize, head: usize| &values[(head * n + at) * dim..][..dim];
    Ok((0..n).map(|at| (0..heads).flat_map(|head| row(at, head).to_vec()).collect()).collect())
}

/// Returns the largest difference, relative to the largest expected magnitude.
pub fn difference(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(1e-2f64, |most, x| most.max(x.abs()));
    let pairs = found.iter().zip(expected);
    let differences = pairs.map(|(&x, y)| (f64::from(x) - y).abs());
    differences.fold(0.0, |most: f64, x| if x.is_nan() { f64::INFINITY } else { most.max(x) })
        / largest
}
