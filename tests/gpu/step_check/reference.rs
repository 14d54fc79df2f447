//! The computation of each launch on the host.

use std::collections::BTreeMap;

use etkv_cuda::{
    Attend, Buffer, CapturedStep, Element, Embed, Gate, Heads, Launch, Plan, Pool, PoolRows,
    Product, Result, StepInputs,
};

use crate::model::{rounded, to_numbers, Model};

/// A completed step.
pub struct CompletedStep<'a> {
    pub model: &'a Model,
    pub plan: &'a Plan,
    pub captured: &'a CapturedStep,
    pub step: StepInputs<'a>,
}

/// The name of a kind of result, and the largest [`difference`] between the found and the expected numbers of
/// this kind.
type Difference = (&'static str, f64);

impl CompletedStep<'_> {
    /// Updates the largest difference of each name with the differences of these launches.
    pub fn add_differences(
        &self,
        launches: impl Fn(&Launch) -> bool,
        largest: &mut BTreeMap<&'static str, f64>,
    ) -> Result<()> {
        for launch in self.plan.launches.iter().filter(|launch| launches(launch)) {
            for (what, found) in self.differences(launch)? {
                let most = largest.entry(what).or_insert(0.0);
                *most = f64::max(*most, found);
            }
        }
        Ok(())
    }

    /// Returns the differences between the results of a launch and the expected results for its inputs.
    fn differences(&self, launch: &Launch) -> Result<Vec<Difference>> {
        match launch {
            Launch::Embed(embed) => self.embed(embed),
            Launch::Product(product) => self.product(product),
            Launch::Attend(attend) => self.attend(attend),
            // Other parts check these.
            Launch::Normalize(_) | Launch::Blend(_) | Launch::PlaceHeads(_) => Ok(Vec::new()),
        }
    }

    fn buffer(&self, Buffer(index): Buffer) -> Result<Vec<f64>> {
        let mut bytes = vec![0; 2 * self.plan.buffers[index]];
        self.captured.read(Buffer(index), &mut bytes)?;
        Ok(to_numbers(self.plan.element, &bytes))
    }

    fn pool(&self, pool: Pool) -> Result<Vec<f64>> {
        let PoolRows::Plain(address) = pool.rows else {
            return Ok(Vec::new());
        };
        let found = self.model.pools.iter().find(|memory| memory.address() == address);
        let mut bytes = Vec::new();
        if let Some(memory) = found {
            bytes.resize(memory.bytes(), 0);
            memory.read(0, &mut bytes)?;
        }
        Ok(to_numbers(self.plan.element, &bytes))
    }

    fn round(&self, x: f64) -> f64 {
        rounded(self.plan.element, x)
    }

    fn embed(&self, embed: &Embed) -> Result<Vec<Difference>> {
        let table = self.model.numbers_of(embed.table);
        let last = embed.vocabulary as i32 - 1;
        let row = |&id: &i32| {
            let row = &table[id.clamp(0, last) as usize * embed.inner..][..embed.inner];
            row.iter().map(|&x| self.round(x))
        };
        let expected: Vec<f64> = self.step.ids.iter().flat_map(row).collect();
        Ok(vec![("embed", difference(&self.buffer(embed.out)?, &expected))])
    }

    /// Returns a row after the norm of the product that reads it, if the product has a norm.
    fn normalized(&self, product: &Product, row: &[f64]) -> Vec<f64> {
        let Some(norm) = product.norm else {
            return row.to_vec();
        };
        let weights = norm.weight.map(|weight| self.model.numbers(weight));
        normalized(self.plan.element, row, weights, false, norm.eps)
    }

    fn product(&self, product: &Product) -> Result<Vec<Difference>> {
        let &Product { inner, outputs, .. } = product;
        let tokens = self.plan.tokens;
        let weight = self.model.numbers_of(product.weight);
        let bias = product.bias.map(|bias| self.model.numbers(bias));
        let x = self.buffer(product.x)?;
        let residual = product.residual.map(|residual| self.buffer(residual)).transpose()?;
        let first = if product.last_row { tokens - 1 } else { 0 };
        let mut expected = Vec::new();
        for (r, t) in (first..tokens).enumerate() {
            let row = self.normalized(product, &x[t * inner..][..inner]);
            let dot = |output: usize| {
                let weights = &weight[output * inner..][..inner];
                let sum: f64 = weights.iter().zip(&row).map(|(w, x)| w * x).sum();
                self.round(sum + bias.map_or(0.0, |bias| bias[output]))
            };
            for output in 0..outputs {
                let mut value = dot(output);
                if let Some(Gate::Silu) = product.gate {
                    let active = self.round(value / (1.0 + (-value).exp()));
                    value = self.round(active * dot(outputs + output));
                }
                if let Some(residual) = &residual {
                    value = self.round(value + residual[r * outputs + output]);
                }
                expected.push(value);
            }
        }
        match &product.heads {
            Some(heads) => self.heads(heads, &self.buffer(product.out)?, &expected),
            None => {
                let what = match (product.gate, product.residual, product.norm) {
                    (Some(_), ..) => "gated",
                    (_, Some(_), _) => "residual",
                    _ => "logits",
                };
                Ok(vec![(what, difference(&self.buffer(product.out)?, &expected))])
            }
        }
    }

    /// Rotates the heads of `rows` and compares them with the heads on the device.
    fn heads(&self, heads: &Heads, q: &[f64], rows: &[f64]) -> Result<Vec<Difference>> {
        let &Heads { n_q, n_kv, head_dim, .. } = heads;
        let all = n_q + 2 * n_kv;
        let (keys, values) = (self.pool(heads.keys)?, self.pool(heads.values)?);
        let periods = heads.periods.map(|periods| self.model.numbers(periods));
        let mut found = [const { Vec::new() }; 3];
        let mut expected = [const { Vec::new() }; 3];
        for t in 0..self.plan.tokens {
            let slot = self.step.slots[t] as usize;
            for head in 0..all {
                let kind = usize::from(head >= n_q) + usize::from(head >= n_q + n_kv);
                let place = |pool: Pool, head: usize| (head * pool.capacity + slot) * head_dim;
                found[kind].extend_from_slice(match kind {
                    0 => &q[(t * n_q + head) * head_dim..][..head_dim],
                    1 => &keys[place(heads.keys, head - n_q)..][..head_dim],
                    _ => &values[place(heads.values, head - n_q - n_kv)..][..head_dim],
                });
                let row = &rows[(t * all + head) * head_dim..][..head_dim];
                let periods = periods.filter(|_| kind < 2).unwrap_or_default();
                let position = self.step.positions[t];
                let element = |j| self.round(rotated(row, periods, position, j));
                expected[kind].extend((0..head_dim).map(element));
            }
        }
        let kinds = ["q", "k", "v"].into_iter().zip(found.iter().zip(&expected));
        Ok(kinds.map(|(what, (found, expected))| (what, difference(found, expected))).collect())
    }

    fn attend(&self, attend: &Attend) -> Result<Vec<Difference>> {
        let &Attend { n_q, n_kv, head_dim, .. } = attend;
        let tokens = self.plan.tokens;
        let (keys, values) = (self.pool(attend.keys)?, self.pool(attend.values)?);
        let q = self.buffer(attend.q)?;
        let mut expected = Vec::new();
        for t in 0..tokens {
            let seen: Vec<usize> = match self.step.mask {
                None => (0..self.step.n_keys - tokens + t + 1).collect(),
                Some(mask) => (0..self.step.n_keys).filter(|&key| mask.sees(t, key)).collect(),
            };
            for head in 0..n_q {
                let query = &q[(t * n_q + head) * head_dim..][..head_dim];
                let kv_head = head / (n_q / n_kv);
                let row = |key: usize, pool: Pool| {
                    (kv_head * pool.capacity + key) * head_dim
                        ..(kv_head * pool.capacity + key + 1) * head_dim
                };
                let key = |at| &keys[row(at, attend.keys)];
                let value = |at| &values[row(at, attend.values)];
                let sums = attended(query, &seen, key, value, f64::from(attend.scale));
                expected.extend(sums.into_iter().map(|sum| self.round(sum)));
            }
        }
        Ok(vec![("attended", difference(&self.buffer(attend.out)?, &expected))])
    }
}

/// Returns the largest difference, relative to the number itself and to the size of all numbers.
pub fn difference(found: &[f64], expected: &[f64]) -> f64 {
    if found.len() < expected.len() {
        return f64::INFINITY;
    }
    let squares: f64 = expected.iter().map(|x| x * x).sum();
    let size = (squares / expected.len().max(1) as f64).sqrt();
    let of = |(x, y): (&f64, &f64)| {
        let distance = (x - y).abs() / (y.abs() + size + 1e-9);
        if distance.is_finite() {
            distance
        } else {
            f64::INFINITY
        }
    };
    found.iter().zip(expected).map(of).fold(0.0, f64::max)
}

/// Returns a row after a norm. With `wide` weights it is rounded once, after the multiplication by the weights.
pub fn normalized(
    element: Element,
    row: &[f64],
    weights: Option<&[f64]>,
    wide: bool,
    eps: f32,
) -> Vec<f64> {
    let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
    let scale = 1.0 / (mean + f64::from(eps)).sqrt();
    let round = |x: f64| rounded(element, x);
    let scaled = row.iter().map(|x| if wide { x * scale } else { round(x * scale) });
    match weights {
        Some(weights) => scaled.zip(weights).map(|(x, by)| round(x * by)).collect(),
        None => scaled.collect(),
    }
}

/// Returns an element of a head after the rotation of its first `2 * periods.len()` elements.
pub fn rotated(row: &[f64], periods: &[f64], position: i32, j: usize) -> f64 {
    let half = periods.len();
    if j >= 2 * half {
        return row[j];
    }
    let angle = f64::from(position as f32 * (1.0 / periods[j % half] as f32));
    let (x, y) = (row[j % half], row[j % half + half]);
    match j < half {
        true => x * angle.cos() - y * angle.sin(),
        false => x * angle.sin() + y * angle.cos(),
    }
}

/// Returns the sum of the values at the keys that a query sees, weighted by the softmax of their scores.
pub fn attended<'a>(
    query: &[f64],
    seen: &[usize],
    key: impl Fn(usize) -> &'a [f64],
    value: impl Fn(usize) -> &'a [f64],
    scale: f64,
) -> Vec<f64> {
    let score = |&at: &usize| {
        let products = query.iter().zip(key(at)).map(|(x, y)| x * y);
        products.sum::<f64>() * scale
    };
    let scores: Vec<f64> = seen.iter().map(score).collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut whole = 0.0;
    let mut sums = vec![0.0; query.len()];
    for (&at, score) in seen.iter().zip(&scores) {
        let weight = (score - most).exp();
        whole += weight;
        sums.iter_mut().zip(value(at)).for_each(|(sum, x)| *sum += weight * x);
    }
    sums.into_iter().map(|sum| sum / whole).collect()
}
