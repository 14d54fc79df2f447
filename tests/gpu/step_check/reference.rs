//! The computation of each launch on the host.

use std::collections::BTreeMap;

use etkv_cuda::{
    Attend, Buffer, CapturedStep, Embed, Gate, Heads, Launch, Plan, Pool, PoolRows, Product,
    Result, StepInputs,
};

use crate::model::{rounded, to_numbers, Model};

/// A completed step.
pub struct CompletedStep<'a> {
    pub model: &'a Model,
    pub plan: &'a Plan,
    pub captured: &'a CapturedStep,
    pub step: StepInputs<'a>,
}

/// The largest difference between found and expected numbers.
pub struct Difference {
    pub what: &'static str,
    pub largest: f64,
}

impl CompletedStep<'_> {
    /// Updates the largest difference of each name by the differences of all launches.
    pub fn add_differences(
        &self,
        launches: impl Fn(&Launch) -> bool,
        largest: &mut BTreeMap<&'static str, f64>,
    ) -> Result<()> {
        for launch in self.plan.launches.iter().filter(|launch| launches(launch)) {
            for found in self.differences(launch)? {
                let most = largest.entry(found.what).or_insert(0.0);
                *most = f64::max(*most, found.largest);
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
        Ok(vec![difference("embed", &self.buffer(embed.out)?, &expected)])
    }

    /// Returns a row after the norm of its product, if it has one.
    fn normalized(&self, product: &Product, row: &[f64]) -> Vec<f64> {
        let Some(norm) = product.norm else {
            return row.to_vec();
        };
        let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (mean + f64::from(norm.eps)).sqrt();
        let scaled = row.iter().map(|x| self.round(x * scale));
        match norm.weight.map(|weight| self.model.numbers(weight)) {
            Some(weights) => scaled.zip(weights).map(|(x, by)| self.round(x * by)).collect(),
            None => scaled.collect(),
        }
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
                Ok(vec![difference(what, &self.buffer(product.out)?, &expected)])
            }
        }
    }

    /// Rotates the heads of `rows` and compares them with the heads on the device.
    fn heads(&self, heads: &Heads, q: &[f64], rows: &[f64]) -> Result<Vec<Difference>> {
        let &Heads { n_q, n_kv, head_dim, .. } = heads;
        let all = n_q + 2 * n_kv;
        let half = head_dim / 2;
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
                for j in 0..head_dim {
                    let Some(periods) = periods.filter(|_| kind < 2) else {
                        expected[kind].push(row[j]);
                        continue;
                    };
                    let period = periods[j % half] as f32;
                    let angle = f64::from(self.step.positions[t] as f32 * (1.0 / period));
                    let (x, y) = (row[j % half], row[j % half + half]);
                    expected[kind].push(self.round(if j < half {
                        x * angle.cos() - y * angle.sin()
                    } else {
                        x * angle.sin() + y * angle.cos()
                    }));
                }
            }
        }
        let whats = ["q", "k", "v"];
        Ok((0..3).map(|kind| difference(whats[kind], &found[kind], &expected[kind])).collect())
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
                let of = |pool: Pool, key: usize| {
                    (kv_head * pool.capacity + key) * head_dim
                        ..(kv_head * pool.capacity + key + 1) * head_dim
                };
                let score = |key: usize| {
                    let row = &keys[of(attend.keys, key)];
                    let sum: f64 = query.iter().zip(row).map(|(x, y)| x * y).sum();
                    sum * f64::from(attend.scale)
                };
                let scores: Vec<f64> = seen.iter().map(|&key| score(key)).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let mut whole = 0.0;
                let mut sums = vec![0.0; head_dim];
                for (&key, score) in seen.iter().zip(&scores) {
                    let weight = (score - most).exp();
                    whole += weight;
                    let row = &values[of(attend.values, key)];
                    sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += weight * x);
                }
                expected.extend(sums.iter().map(|sum| self.round(sum / whole)));
            }
        }
        Ok(vec![difference("attended", &self.buffer(attend.out)?, &expected)])
    }
}

/// Returns the largest difference, relative to the number itself and to the size of all numbers.
fn difference(what: &'static str, found: &[f64], expected: &[f64]) -> Difference {
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
    let largest = found.iter().zip(expected).map(of).fold(0.0, f64::max);
    let largest = if found.len() >= expected.len() { largest } else { f64::INFINITY };
    Difference { what, largest }
}
