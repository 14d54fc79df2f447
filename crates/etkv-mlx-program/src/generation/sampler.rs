//! Samples tokens on the device, as [`Sampling::choose`] does on the host.

use etkv_delegate::Sampling;
use mlx_rs::ops::indexing::argmax_axis;
use mlx_rs::ops::{arange, select, softmax_axis, sort_axis};
use mlx_rs::{Array, Dtype};

use super::chosen_tokens::DeviceTokens;
use crate::error::{fail, Result};
use etkv::mlx::{self, cast, slice_axis};

/// Chooses tokens with the parameters of a [`Sampling`].
#[derive(Default)]
pub struct Sampler {
    sampling: Sampling,
    /// The bias of each token, `[vocabulary]`, float32, once the vocabulary is known.
    bias: Option<Array>,
}

impl Sampler {
    /// Returns a sampler for a checked `sampling`.
    pub fn new(sampling: Sampling) -> Self {
        Self { sampling, bias: None }
    }

    /// Drops the arrays, under the lock of MLX.
    pub fn release(&mut self) {
        self.bias = None;
    }

    /// Chooses a token for each row of `logits`, `[B, vocabulary]`. `recent`, `[B, n]`, are the tokens
    /// that count as repeated; `draws` are numbers from 0 to 1, one for each row.
    ///
    /// # Errors
    /// [`InvalidArgument`](etkv::Status::InvalidArgument) for a bias of a token without a logit.
    pub fn choose(
        &mut self,
        logits: &Array,
        recent: Option<&Array>,
        draws: &[f32],
    ) -> Result<DeviceTokens> {
        let mut logits = logits.clone();
        if !self.sampling.logit_bias.is_empty() {
            logits = cast(&logits, Dtype::Float32)?.add(self.bias(logits.dim(-1))?)?;
        }
        if let Some(recent) = recent {
            logits = self.penalized(&cast(&logits, Dtype::Float32)?, recent)?;
        }
        if self.sampling.temperature == 0.0 {
            let tokens = cast(&argmax_axis(&logits, -1, false)?, Dtype::Int32)?;
            let witness = cast(&logits.max_axis(-1, false)?, Dtype::Float32)?;
            return Ok(DeviceTokens { tokens, witness, below: logits.dim(-1) });
        }
        let draws = mlx::array_of(draws, &[draws.len() as i32, 1])?;
        self.drawn(&cast(&logits, Dtype::Float32)?, &draws)
    }

    fn bias(&mut self, vocabulary: i32) -> Result<&Array> {
        let fits = |bias: &Array| bias.size() == vocabulary as usize;
        if !self.bias.as_ref().is_some_and(fits) {
            self.sampling.check_vocabulary(vocabulary as usize)?;
            let mut dense = vec![0.0f32; vocabulary as usize];
            for &(id, bias) in &self.sampling.logit_bias {
                dense[id as usize] += bias;
            }
            self.bias = Some(Array::from_slice(&dense, &[vocabulary]));
        }
        match &self.bias {
            Some(bias) => Ok(bias),
            None => fail!(Internal, "the bias is not computed yet"),
        }
    }

    fn penalized(&self, logits: &Array, recent: &Array) -> Result<Array> {
        let penalty = Array::from_f32(self.sampling.repetition_penalty);
        let found = logits.take_along_axis(recent, -1)?;
        let [less, more] = [found.divide(&penalty)?, found.multiply(&penalty)?];
        let changed = select(found.gt(Array::from_f32(0.0))?, less, more)?;
        // A repeated token gets the same value twice.
        Ok(logits.put_along_axis(recent, changed, -1)?)
    }

    /// Chooses the first token at which the cumulative weight of the kept tokens exceeds the fraction `draws`
    /// of the total weight.
    fn drawn(&self, logits: &Array, draws: &Array) -> Result<DeviceTokens> {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        let vocabulary = logits.dim(-1);
        let zero = Array::from_f32(0.0);
        let mut logits = logits.divide(Array::from_f32(temperature))?;
        if top_k > 0 && top_k < vocabulary as usize {
            let sorted = sort_axis(&logits, -1)?;
            let at = vocabulary - top_k as i32;
            let least = slice_axis(&sorted, 1, at, at + 1, 1)?;
            let none = Array::from_f32(f32::NEG_INFINITY);
            logits = select(logits.ge(least)?, &logits, none)?;
        }
        let mut p = softmax_axis(&logits, -1, true)?;
        if top_p < 1.0 {
            let sorted = sort_axis(&p, -1)?;
            // Weights are in ascending order. The total minus the cumulative sum at a token is the weight of the more
            // probable tokens.
            let sums = sorted.cumsum(-1, false, true)?;
            let all = slice_axis(&sums, 1, vocabulary - 1, vocabulary, 1)?;
            let kept = all.subtract(&sums)?.lt(Array::from_f32(top_p))?;
            let least = select(kept, &sorted, Array::from_f32(1.0))?.min_axis(-1, true)?;
            p = select(p.ge(least)?, &p, &zero)?;
        }
        if min_p > 0.0 {
            let least = p.max_axis(-1, true)?.multiply(Array::from_f32(min_p))?;
            p = select(p.ge(least)?, &p, &zero)?;
        }
        let sums = p.cumsum(-1, false, true)?;
        let all = slice_axis(&sums, 1, vocabulary - 1, vocabulary, 1)?;
        // By rounding, a parallel cumulative sum may grow at a dropped token.
        let passed = sums.gt(all.multiply(draws)?)?.logical_and(p.gt(&zero)?)?;
        let none = Array::from_int(vocabulary);
        let ids = arange::<_, i32>(0, vocabulary, None)?.reshape(&[1, vocabulary])?;
        let first = select(passed, ids, &none)?.min_axis(-1, false)?;
        let best = cast(&argmax_axis(&p, -1, false)?, Dtype::Int32)?;
        let tokens = select(first.lt(&none)?, &first, best)?;
        let witness = all.reshape(&[-1])?.contiguous()?;
        Ok(DeviceTokens { tokens, witness, below: vocabulary })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;

    /// Logits whose probabilities differ by more than the rounding of sums: a few hundred tokens.
    fn logits(row: usize, n: usize) -> Vec<f32> {
        (0..n).map(|id| ((id * 7919 + row * 104_729) % 1009) as f32 / 130.0 - 3.0).collect()
    }

    #[test]
    fn the_device_chooses_what_the_host_chooses() {
        let (rows, vocabulary) = (3, 307);
        let plain = Sampling { temperature: 0.8, seed: 5, ..Sampling::default() };
        let bias = vec![(3, 4.0), (100, f32::NEG_INFINITY)];
        let cases = [
            Sampling::default(),
            plain.clone(),
            Sampling { top_k: 20, ..plain.clone() },
            Sampling { top_p: 0.7, ..plain.clone() },
            Sampling { top_p: 1e-9, ..plain.clone() },
            Sampling { min_p: 0.2, ..plain.clone() },
            Sampling { top_k: 40, top_p: 0.9, min_p: 0.05, ..plain.clone() },
            Sampling { logit_bias: bias.clone(), ..plain.clone() },
            Sampling { repetition_penalty: 1.7, ..plain.clone() },
            Sampling { repetition_penalty: 1.7, logit_bias: bias, ..Sampling::default() },
        ];
        mlx::run(|| {
            let all: Vec<f32> = (0..rows).flat_map(|row| logits(row, vocabulary)).collect();
            let array = Array::from_slice(&all, &[rows as i32, vocabulary as i32]);
            let text: Vec<i64> = vec![1, 5, 5, 306, 12];
            for sampling in cases {
                let recent = sampling.recent(&text).to_vec();
                let ids: Vec<i32> =
                    (0..rows).flat_map(|_| recent.iter().map(|&id| id as i32)).collect();
                let on_device = (!recent.is_empty())
                    .then(|| Array::from_slice(&ids, &[rows as i32, recent.len() as i32]));
                let mut sampler = Sampler::new(sampling.clone());
                for n in 0..40 {
                    let draws: Vec<f32> = (0..rows).map(|row| sampling.draw(row, n)).collect();
                    let chosen = sampler.choose(&array, on_device.as_ref(), &draws)?;
                    for (row, id) in chosen.ids()?.into_iter().enumerate() {
                        let row_logits = logits(row, vocabulary);
                        let expected = sampling.choose(&row_logits, &recent, draws[row])?;
                        assert_eq!(id, expected as i64, "{sampling:?}, row {row}, token {n}");
                    }
                }
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn what_is_not_finite_is_refused() {
        mlx::run(|| {
            let array = Array::from_slice(&[0.0, f32::NAN, 1.0], &[1, 3]);
            for temperature in [0.0, 1.0] {
                let sampling = Sampling { temperature, ..Sampling::default() };
                let chosen = Sampler::new(sampling).choose(&array, None, &[0.5])?;
                assert_eq!(chosen.ids().unwrap_err().status(), Status::Backend);
            }
            let far = Sampling { logit_bias: vec![(3, 1.0)], ..Sampling::default() };
            assert!(Sampler::new(far).choose(&array, None, &[0.5]).is_err());
            Ok(())
        })
        .unwrap();
    }
}
