//! A step of answers: its tokens, its logits, and the tokens sampled from them.

use std::sync::Arc;

use mlx_rs::ops::concatenate;
use mlx_rs::Array;

use super::Generation;
use crate::error::{fail, Result};
use crate::generation::chosen_tokens::ChosenTokens;
use crate::runtime::Tokens;
use etkv::mlx::{self, slice_axis, Mlx};
use etkv::{MlxCache, Step};

/// The tokens of one step: several of one answer, or one for each of several answers.
pub(super) struct Batch<'a> {
    pub answers: &'a [usize],
    pub tokens: Tokens<'a>,
    pub positions: &'a [i32],
    /// Whether tokens are sampled from the step's logits.
    pub choose: bool,
}

impl Generation {
    /// Starts a step, and calls `work` with the step and the tokens that the step chooses. If `work` fails, the step
    /// is rolled back.
    pub(super) fn with_step<T>(
        &mut self,
        mlx: &mut Mlx,
        cache: &mut MlxCache,
        batch: Batch,
        work: impl FnOnce(&mut Mlx, Option<ChosenTokens>, Step<'_>) -> Result<T>,
    ) -> Result<T> {
        let loaded = Arc::clone(&self.program.0);
        let begun = loaded.stream.run(mlx, || self.begin(mlx, cache, &batch));
        let done = begun.and_then(|(chosen, step)| work(mlx, chosen, step));
        if done.is_err() {
            withdraw(cache);
        }
        done
    }

    /// Declares the sequences of a step of `n` tokens, if the cache has several sequences.
    pub(super) fn declare(&self, cache: &mut MlxCache, answers: &[usize], n: usize) -> Result<()> {
        let Some(cells) = cache.sequences_mut() else {
            return Ok(());
        };
        let sequence = |&index: &usize| self.answers[index].sequence;
        Ok(cells.begin_step(&match answers {
            [one] => vec![sequence(one); n],
            each => each.iter().map(sequence).collect(),
        })?)
    }

    /// Opens a step, and starts its computation.
    fn begin<'c>(
        &mut self,
        mlx: &Mlx,
        cache: &'c mut MlxCache,
        batch: &Batch,
    ) -> Result<(Option<ChosenTokens>, Step<'c>)> {
        self.declare(cache, batch.answers, batch.positions.len())?;
        let program = &self.program.0;
        // For a prompt, only the last row is sampled.
        let one_row = batch.answers.len() == 1;
        let (logits, step) =
            program.logits(mlx, &self.inputs, &batch.tokens, batch.positions, one_row, cache)?;
        if !batch.choose {
            // The logits are never computed.
            drop(logits);
            step.eval(&[])?;
            return Ok((None, step));
        }
        let logits = last_rows(&logits, batch.answers.len())?;
        let recent = self.recent(batch, logits.dim(-1))?;
        let pending = usize::from(matches!(batch.tokens, Tokens::Device(..)));
        let draws: Vec<f32> = batch
            .answers
            .iter()
            .map(|&index| {
                let n = self.answers[index].n_answered() + pending;
                self.options.sampling.draw(index, n as u64)
            })
            .collect();
        let chosen = self.sampler.choose(&logits, recent.as_ref(), &draws)?;
        step.schedule(&chosen.arrays())?;
        Ok((Some(ChosenTokens::Device(chosen)), step))
    }

    /// Returns the tokens that count as repeated, `[B, n]`: tokens of the texts, and tokens that the device has
    /// chosen.
    fn recent(&self, batch: &Batch, vocabulary: i32) -> Result<Option<Array>> {
        let sampling = &self.options.sampling;
        if !sampling.is_repetition_penalized() {
            return Ok(None);
        }
        let coming = match &batch.tokens {
            Tokens::Device(ids, _) => Some(ids.reshape(&[-1, 1])?),
            Tokens::Host(_) => None,
        };
        let most = sampling.repetition_context - usize::from(coming.is_some());
        let texts = || batch.answers.iter().map(|&index| &self.answers[index].text[..]);
        let width = texts().map(|text| text.len().min(most)).max().unwrap_or(0);
        let mut ids: Vec<i32> = Vec::new();
        for text in texts() {
            let recent = &text[text.len() - text.len().min(most)..];
            // Shorter rows are filled with their first token: a repeated token counts once.
            let filler = recent.first().copied().into_iter().cycle();
            let row = recent.iter().copied().chain(filler).take(width);
            for id in row {
                // MLX does not check indices: an index past the end would overwrite other memory.
                match i32::try_from(id) {
                    Ok(id) if id < vocabulary => ids.push(id),
                    _ => fail!(
                        InvalidArgument,
                        "token {id} has no logit to penalize, the vocabulary has {vocabulary}; set \
                         repetition_penalty to 1"
                    ),
                }
            }
        }
        let known = mlx::array_of(&ids, &[batch.answers.len() as i32, width as i32])?;
        Ok(Some(match coming {
            None => known,
            Some(coming) if width == 0 => coming,
            Some(coming) => concatenate(&[&known, &coming], 1)?,
        }))
    }
}

/// Withdraws the declaration of a step that will not run.
pub fn withdraw(cache: &mut MlxCache) {
    if let Some(cells) = cache.sequences_mut() {
        // No step is open, so the cancellation cannot be refused.
        let _ = cells.cancel_step();
    }
}

/// Returns the last `n` rows of logits, `[1, T, vocabulary]`, as `[n, vocabulary]`.
pub fn last_rows(logits: &Array, n: usize) -> Result<Array> {
    let (rows, n) = (logits.shape().get(1).copied().unwrap_or(0), n as i32);
    if logits.ndim() != 3 || logits.dim(0) != 1 {
        fail!(
            Unsupported,
            "cannot choose tokens from logits of shape {:?}, expected [1, T, vocabulary]",
            logits.shape()
        );
    }
    if rows < n {
        fail!(
            Unsupported,
            "the program returns logits of {rows} of {n} tokens; load it with logits=all or proposed, and \
             export it without `--logits last`"
        );
    }
    let logits = match rows == n {
        true => logits.clone(),
        false => slice_axis(logits, 1, rows - n, rows, 1)?,
    };
    Ok(logits.reshape(&[n, logits.dim(2)])?)
}
