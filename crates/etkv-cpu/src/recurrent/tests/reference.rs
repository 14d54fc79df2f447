//! The recurrence and the convolution, token by token in float64, and the inputs of a text.

use crate::attention::synthetic::Random;
use crate::recurrent::Scan;

/// The inputs of all tokens of a text.
#[derive(Debug, Clone)]
pub struct Text {
    pub scan: Scan,
    pub delta: bool,
    pub q: Vec<Vec<f32>>,
    pub k: Vec<Vec<f32>>,
    pub v: Vec<Vec<f32>>,
    pub g: Vec<Vec<f32>>,
    pub beta: Vec<Vec<f32>>,
}

impl Text {
    pub fn new(scan: Scan, delta: bool, n: usize, random: &mut Random) -> Self {
        let Scan { k_heads, heads, k_dim, v_dim, channel_decay, .. } = scan;
        let mut rows = |len: usize, make: &dyn Fn(f32) -> f32| -> Vec<Vec<f32>> {
            (0..n).map(|_| (0..len).map(|_| make(random.number())).collect()).collect()
        };
        let mut k = rows(k_heads * k_dim, &|x| x);
        for row in &mut k {
            for key in row.chunks_mut(k_dim) {
                let norm = key.iter().map(|x| x * x).sum::<f32>().sqrt();
                key.iter_mut().for_each(|x| *x /= norm);
            }
        }
        Self {
            scan,
            delta,
            k,
            q: rows(k_heads * k_dim, &|x| x),
            v: rows(heads * v_dim, &|x| x),
            g: rows(heads * if channel_decay { k_dim } else { 1 }, &|x| -0.15 * (x + 1.0)),
            beta: rows(heads, &|x| 0.5 * (x + 1.0)),
        }
    }

    /// Returns the outputs of the tokens on a path, each `[heads, v_dim]`, and the states before the tokens at
    /// multiples of 64 positions, each `[heads, k_dim, v_dim]`.
    pub fn expected(&self, path: &[usize]) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
        let Scan { k_heads, heads, k_dim, v_dim, channel_decay, scale } = self.scan;
        let mut states = vec![Vec::new(); path.len().div_ceil(64)];
        let mut outs = vec![vec![0f64; heads * v_dim]; path.len()];
        for head in 0..heads {
            let mut state = vec![0f64; k_dim * v_dim];
            let k_head = head / (heads / k_heads);
            for (at, (&t, out)) in path.iter().zip(&mut outs).enumerate() {
                if at % 64 == 0 {
                    states[at / 64].extend(&state);
                }
                let f64s = |row: &[f32]| row.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
                let key = f64s(&self.k[t][k_head * k_dim..][..k_dim]);
                let query = f64s(&self.q[t][k_head * k_dim..][..k_dim]);
                let mut update = f64s(&self.v[t][head * v_dim..][..v_dim]);
                for c in 0..k_dim {
                    let g = self.g[t][if channel_decay { head * k_dim + c } else { head }];
                    let decay = f64::from(g).exp();
                    state[c * v_dim..][..v_dim].iter_mut().for_each(|x| *x *= decay);
                }
                if self.delta {
                    for (j, u) in update.iter_mut().enumerate() {
                        let seen: f64 = (0..k_dim).map(|c| state[c * v_dim + j] * key[c]).sum();
                        *u = f64::from(self.beta[t][head]) * (*u - seen);
                    }
                }
                for c in 0..k_dim {
                    for j in 0..v_dim {
                        state[c * v_dim + j] += key[c] * update[j];
                    }
                }
                for (j, o) in out[head * v_dim..][..v_dim].iter_mut().enumerate() {
                    let sum: f64 = (0..k_dim).map(|c| state[c * v_dim + j] * query[c]).sum();
                    *o = f64::from(scale) * sum;
                }
            }
        }
        (outs, states)
    }
}

/// Returns the convolution of the columns of a path.
pub fn convolved(
    columns: &[Vec<f32>],
    path: &[usize],
    weight: &[f32],
    bias: Option<&[f32]>,
    silu: bool,
) -> Vec<Vec<f64>> {
    let channels = columns[0].len();
    let width = weight.len() / channels;
    let at = |t: usize, c: usize| {
        let mut sum = bias.map_or(0.0, |bias| f64::from(bias[c]));
        for tap in 0..width {
            if t + tap + 1 >= width {
                let column = &columns[path[t + tap + 1 - width]];
                sum += f64::from(weight[c * width + tap]) * f64::from(column[c]);
            }
        }
        if silu {
            sum / (1.0 + (-sum).exp())
        } else {
            sum
        }
    };
    (0..path.len()).map(|t| (0..channels).map(|c| at(t, c)).collect()).collect()
}
