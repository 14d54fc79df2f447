//! Sampling: the choice of a token from logits.
//!
//! A backend may sample on its device; [`Sampling::choose`] defines the result. The backend and `choose` use the same
//! random numbers, so the same seed gives the same tokens, unless a choice depends on the last bits of a float.

use std::borrow::Cow;

use etkv_core::{fail, Result};
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Sampling parameters, in the order in which they are applied.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Numbers that are added to the logits of these token ids. Minus infinity forbids a token.
    pub logit_bias: Vec<(i64, f32)>,
    /// For tokens in the text, positive logits are divided by this number, and negative logits are multiplied by it.
    /// 1 changes nothing.
    pub repetition_penalty: f32,
    /// The number of last tokens of the text that count as repeated.
    pub repetition_context: usize,
    /// The divisor of the logits. At 0 the argmax is chosen, and the fields below have no effect.
    pub temperature: f32,
    /// Only the tokens with the `top_k` largest logits are kept; 0 keeps all.
    pub top_k: usize,
    /// Only the most probable tokens are kept: as few as reach this total probability.
    pub top_p: f32,
    /// Only tokens with at least this fraction of the largest probability are kept.
    pub min_p: f32,
    /// The seed of the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    /// Greedy sampling.
    fn default() -> Self {
        Self {
            logit_bias: Vec::new(),
            repetition_penalty: 1.0,
            repetition_context: 64,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Checks the fields.
    ///
    /// # Errors
    /// [`InvalidArgument`](etkv_core::Status::InvalidArgument) for a number that is out of range.
    pub fn check(&self) -> Result<()> {
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            fail!(
                InvalidArgument,
                "temperature is {}, expected a finite number of at least 0",
                self.temperature
            );
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            fail!(InvalidArgument, "top_p is {}, expected more than 0 and at most 1", self.top_p);
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            fail!(InvalidArgument, "min_p is {}, expected 0 to 1", self.min_p);
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            fail!(
                InvalidArgument,
                "repetition_penalty is {}, expected more than 0",
                self.repetition_penalty
            );
        }
        for (id, bias) in &self.logit_bias {
            if *id < 0 {
                fail!(InvalidArgument, "logit_bias names token {id}, the minimum is 0");
            }
            if bias.is_nan() || *bias == f32::INFINITY {
                fail!(InvalidArgument, "the logit_bias of token {id} is {bias}, expected a number");
            }
        }
        Ok(())
    }

    /// Checks that the vocabulary has the token ids of the bias.
    ///
    /// # Errors
    /// [`InvalidArgument`](etkv_core::Status::InvalidArgument) for an id that is not in the vocabulary.
    pub fn check_vocabulary(&self, vocabulary: usize) -> Result<()> {
        match self.logit_bias.iter().find(|(id, _)| *id >= vocabulary as i64) {
            Some((id, _)) => fail!(
                InvalidArgument,
                "logit_bias names token {id}, but the vocabulary has {vocabulary} tokens"
            ),
            None => Ok(()),
        }
    }

    /// Returns whether the argmax is always chosen, whatever the text.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 && self.logit_bias.is_empty() && !self.is_repetition_penalized()
    }

    /// Returns whether repeated tokens are penalized.
    pub fn is_repetition_penalized(&self) -> bool {
        self.repetition_penalty != 1.0 && self.repetition_context > 0
    }

    /// Returns the last tokens of `text` that count as repeated.
    pub fn recent<'a>(&self, text: &'a [i64]) -> &'a [i64] {
        if self.is_repetition_penalized() {
            &text[text.len().saturating_sub(self.repetition_context)..]
        } else {
            &[]
        }
    }

    /// Returns the random number for token `n` of the answer to prompt `answer`: at least 0 and less than 1.
    pub fn draw(&self, answer: usize, n: u64) -> f32 {
        let mut numbers = ChaCha8Rng::seed_from_u64(self.seed);
        numbers.set_stream(answer as u64);
        numbers.set_word_pos(u128::from(n));
        // A float has 24 bits of precision.
        (numbers.next_u32() >> 8) as f32 / (1u32 << 24) as f32
    }

    /// Chooses a token from the logits of the vocabulary. `recent` are the tokens that count as repeated, and `draw`
    /// is the random number, from 0 to 1.
    ///
    /// # Errors
    /// [`InvalidArgument`](etkv_core::Status::InvalidArgument) if there are no logits, a logit is not finite, or a
    /// bias is for a token without a logit.
    pub fn choose(&self, logits: &[f32], recent: &[i64], draw: f32) -> Result<usize> {
        self.check_vocabulary(logits.len())?;
        let mut logits = Cow::Borrowed(logits);
        for &(id, bias) in &self.logit_bias {
            logits.to_mut()[id as usize] += bias;
        }
        if !recent.is_empty() {
            self.penalize(logits.to_mut(), recent);
        }
        let best = argmax(&logits)?;
        if self.temperature == 0.0 {
            return Ok(best);
        }
        let mut weights = logits.into_owned();
        self.weigh(&mut weights, best);
        Ok(pick(&weights, draw).unwrap_or(best))
    }

    fn penalize(&self, logits: &mut [f32], recent: &[i64]) {
        let mut done: Vec<i64> = recent.to_vec();
        done.sort_unstable();
        done.dedup();
        for id in done {
            // A token without a logit cannot be chosen, so a bias that forbids it is harmless.
            let Some(logit) = usize::try_from(id).ok().and_then(|id| logits.get_mut(id)) else {
                continue;
            };
            if *logit > 0.0 {
                *logit /= self.repetition_penalty;
            } else {
                *logit *= self.repetition_penalty;
            }
        }
    }

    /// Replaces each logit by the token's weight in the choice: 1 for the argmax, and 0 for a token that is not kept.
    fn weigh(&self, logits: &mut [f32], best: usize) {
        let most = logits[best];
        let mut sorted: Vec<f32> = Vec::new();
        if self.top_k > 0 && self.top_k < logits.len() {
            sorted.extend_from_slice(logits);
            let (_, &mut least, _) =
                sorted.select_nth_unstable_by(self.top_k - 1, |a, b| b.total_cmp(a));
            for logit in logits.iter_mut().filter(|logit| **logit < least) {
                *logit = f32::NEG_INFINITY;
            }
        }
        for logit in logits.iter_mut() {
            *logit = ((*logit - most) / self.temperature).exp();
        }
        let mut least = self.min_p;
        if self.top_p < 1.0 {
            sorted.clear();
            sorted.extend(logits.iter().copied().filter(|&weight| weight > 0.0));
            sorted.sort_unstable_by(|a, b| b.total_cmp(a));
            let enough = self.top_p * sorted.iter().sum::<f32>();
            // The token whose weight brings the sum to `top_p` is kept too.
            let mut before = 0.0;
            let mut last = 1.0;
            for &weight in &sorted {
                if before >= enough {
                    break;
                }
                (before, last) = (before + weight, weight);
            }
            least = least.max(last);
        }
        for weight in logits.iter_mut().filter(|weight| **weight < least) {
            *weight = 0.0;
        }
    }
}

/// Returns the index of the largest number. If several are equally large, returns the first of them.
fn argmax(values: &[f32]) -> Result<usize> {
    let Some((&first, rest)) = values.split_first() else {
        fail!(InvalidArgument, "there are no logits to choose from");
    };
    let (mut best, mut most) = (0, first);
    for (index, &value) in (1..).zip(rest) {
        if value > most || value.is_nan() {
            (best, most) = (index, value);
        }
    }
    if most.is_nan() || most == f32::NEG_INFINITY {
        fail!(InvalidArgument, "the logit of token {best} is {most}, expected a finite number");
    }
    Ok(best)
}

/// Returns the index of the first token at which the cumulative weight exceeds `draw` times the total.
fn pick(weights: &[f32], draw: f32) -> Option<usize> {
    let all: f32 = weights.iter().sum();
    let mut sum = 0.0;
    weights.iter().position(|weight| {
        sum += weight;
        sum > draw * all
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use etkv_core::Status;

    /// Returns logits with these probabilities.
    fn logits(shares: &[f32]) -> Vec<f32> {
        shares.iter().map(|share| share.ln()).collect()
    }

    fn sampling() -> Sampling {
        Sampling { temperature: 1.0, ..Sampling::default() }
    }

    /// Returns how often each token is chosen over a fine grid of draws.
    fn chosen(sampling: &Sampling, shares: &[f32]) -> Vec<usize> {
        let mut counts = vec![0; shares.len()];
        for at in 0..1000 {
            let draw = (at as f32 + 0.5) / 1000.0;
            counts[sampling.choose(&logits(shares), &[], draw).unwrap()] += 1;
        }
        counts
    }

    const SHARES: [f32; 4] = [0.1, 0.4, 0.2, 0.3];

    #[test]
    fn a_token_is_chosen_as_often_as_it_is_probable() {
        assert_eq!(chosen(&sampling(), &SHARES), [100, 400, 200, 300]);
        let warm = Sampling { temperature: 0.5, ..sampling() };
        // The shares are squared: 1, 16, 4 and 9 of 30.
        let counts = chosen(&warm, &SHARES);
        for (count, square) in counts.iter().zip([1.0, 16.0, 4.0, 9.0]) {
            assert!((*count as f32 - 1000.0 * square / 30.0).abs() <= 1.0, "{counts:?}");
        }
    }

    #[test]
    fn tokens_that_are_not_kept_are_not_chosen() {
        let kept = |sampling: &Sampling| -> Vec<usize> {
            let counts = chosen(sampling, &SHARES);
            (0..4).filter(|&id| counts[id] > 0).collect()
        };
        assert_eq!(kept(&Sampling { top_k: 1, ..sampling() }), [1]);
        assert_eq!(kept(&Sampling { top_k: 3, ..sampling() }), [1, 2, 3]);
        assert_eq!(kept(&Sampling { top_k: 9, ..sampling() }), [0, 1, 2, 3]);
        assert_eq!(kept(&Sampling { top_p: 0.3, ..sampling() }), [1]);
        assert_eq!(kept(&Sampling { top_p: 0.5, ..sampling() }), [1, 3]);
        assert_eq!(kept(&Sampling { top_p: 0.71, ..sampling() }), [1, 2, 3]);
        assert_eq!(kept(&Sampling { min_p: 0.6, ..sampling() }), [1, 3]);
        assert_eq!(kept(&Sampling { top_k: 3, top_p: 0.5, min_p: 0.9, ..sampling() }), [1]);
        let forbidden = vec![(1, f32::NEG_INFINITY)];
        assert_eq!(kept(&Sampling { logit_bias: forbidden, top_k: 2, ..sampling() }), [2, 3]);
    }

    #[test]
    fn repetition_counts_once_and_for_the_context_only() {
        let penalty =
            Sampling { repetition_penalty: 2.0, repetition_context: 2, ..Sampling::default() };
        let text = [0, 1, 1];
        assert_eq!(penalty.recent(&text), [1, 1]);
        assert!(Sampling::default().recent(&text).is_empty());
        let choose =
            |logits: Vec<f32>| penalty.choose(&logits, penalty.recent(&text), 0.0).unwrap();
        assert_eq!(choose(vec![1.0, 3.9, 2.0]), 2);
        assert_eq!(choose(vec![1.0, 4.1, 2.0]), 1);
        assert_eq!(choose(vec![-3.0, -1.0, -1.9]), 2);
    }

    #[test]
    fn ties_go_to_the_first_and_nan_is_refused() {
        let greedy = Sampling::default();
        assert_eq!(greedy.choose(&[1.0, 2.0, 2.0], &[], 0.5).unwrap(), 1);
        for sampling in [greedy, sampling()] {
            for bad in [&[f32::NAN, 1.0][..], &[1.0, f32::NAN, 2.0], &[f32::NEG_INFINITY; 2], &[]] {
                let error = sampling.choose(bad, &[], 0.5).unwrap_err();
                assert_eq!(error.status(), Status::InvalidArgument);
            }
        }
    }

    #[test]
    fn draws_are_even_and_their_own() {
        let draws = |seed, answer| -> Vec<f32> {
            let sampling = Sampling { seed, ..sampling() };
            (0..2000).map(|n| sampling.draw(answer, n)).collect()
        };
        let all = draws(7, 0);
        assert_eq!(all, draws(7, 0));
        assert_ne!(all, draws(8, 0));
        assert_ne!(all, draws(7, 1));
        assert!(all.iter().all(|draw| (0.0..1.0).contains(draw)));
        let mean = all.iter().sum::<f32>() / 2000.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        for bad in [
            Sampling { temperature: f32::NAN, ..sampling() },
            Sampling { temperature: -0.1, ..sampling() },
            Sampling { top_p: 0.0, ..sampling() },
            Sampling { top_p: 1.1, ..sampling() },
            Sampling { min_p: -0.1, ..sampling() },
            Sampling { repetition_penalty: 0.0, ..sampling() },
            Sampling { logit_bias: vec![(-1, 0.0)], ..sampling() },
            Sampling { logit_bias: vec![(0, f32::NAN)], ..sampling() },
        ] {
            assert_eq!(bad.check().unwrap_err().status(), Status::InvalidArgument, "{bad:?}");
        }
        assert!(sampling().check().is_ok());
        let far = Sampling { logit_bias: vec![(3, 1.0)], ..sampling() };
        assert!(far.choose(&[0.0; 3], &[], 0.0).is_err());
    }
}
