//! Steps of answers with async decode: the next step is enqueued before the host reads the token.

use std::sync::Arc;

use tracing::debug;

use super::step::{withdraw, Batch};
use super::Generation;
use crate::error::{fail, Result};
use crate::generation::answer::next_position;
use crate::generation::chosen_tokens::ChosenTokens;
use crate::generation::RunAhead;
use crate::runtime::Tokens;
use crate::TARGET;
use etkv::mlx;
use etkv::{MlxCache, Step};

/// Tokens whose computation is enqueued.
pub(super) struct PendingTokens {
    /// The answers that these tokens continue.
    pub answers: Vec<usize>,
    pub chosen: ChosenTokens,
    /// The number of the step that computes the tokens, if it is not committed yet.
    pub step: Option<u64>,
    /// Whether the step that computes the tokens is committed before its values are known to be finite.
    pub unread: bool,
}

impl Generation {
    /// Commits the enqueued step of the `active` answers, or runs a step. Then starts the next step. Returns the
    /// chosen tokens, whose computation may still run.
    pub(super) fn advance(&mut self, active: Vec<usize>) -> Result<PendingTokens> {
        let shared = self.cache.clone();
        // The lock is held until the step's values are known to be finite. Before that, no other call may build on
        // the values.
        let mut cache = shared.lock()?;
        let coming = match self.ahead.take() {
            Some(ahead) => self.settled(&mut *cache, ahead)?,
            None => self.again(&mut *cache, active)?,
        };
        if self.runs_ahead(&*cache, coming.answers.len())? {
            // If this fails, no step is enqueued. The next call runs the step, and returns the error if the step
            // fails again.
            match self.run_ahead(&mut *cache, &coming) {
                Ok(next) => self.ahead = next,
                Err(error) => debug!(target: TARGET, %error, "cannot enqueue the next step"),
            }
        }
        if coming.unread {
            self.check(&mut *cache, coming)
        } else {
            Ok(coming)
        }
    }

    /// Returns whether the next step, with this number of tokens, is enqueued before the tokens of the current step
    /// are read.
    fn runs_ahead(&self, cache: &MlxCache, tokens: usize) -> Result<bool> {
        match self.options.run_ahead {
            RunAhead::Auto => Ok(mlx::on_gpu()? && !self.is_fast(cache, tokens)),
            RunAhead::Never => Ok(false),
            RunAhead::Always => Ok(true),
        }
    }

    /// Returns whether an executor runs steps of this number of tokens. An executor is faster than async
    /// decode.
    fn is_fast(&self, cache: &MlxCache, tokens: usize) -> bool {
        let executor = self.program.0.executor.as_ref();
        self.options.sampling.is_greedy()
            && executor.is_some_and(|executor| executor.suits(cache, tokens))
    }

    /// Waits for the values of the committed step. If they are not finite, undoes that step and the next one.
    fn check(&mut self, cache: &mut MlxCache, mut coming: PendingTokens) -> Result<PendingTokens> {
        // Other threads may use MLX during the wait. If the wait fails, reading the tokens returns the error.
        let waited = mlx::enter().and_then(|mut mlx| mlx.outside(|| coming.chosen.wait()));
        coming.unread = false;
        let Err(error) = cache.check_unread() else {
            return Ok(coming);
        };
        withdraw(cache);
        for &index in &coming.answers {
            self.answers[index].done -= 1;
        }
        release(coming.chosen);
        let _held = mlx::hold();
        self.ahead = None;
        // Tokens that the device failed to compute cannot be read again.
        self.broken = waited.as_ref().err().cloned();
        Err(waited.err().unwrap_or(error.into()))
    }

    /// Commits the step that computes these tokens. If the step was rolled back meanwhile, runs it again.
    fn settled(&mut self, cache: &mut MlxCache, mut ahead: PendingTokens) -> Result<PendingTokens> {
        let Some(number) = ahead.step.take() else {
            return Ok(ahead);
        };
        let unread = cache.can_commit_unread();
        match self.commit(cache, number, &ahead.chosen, unread) {
            Ok(true) => {
                for &index in &ahead.answers {
                    self.answers[index].done += 1;
                }
                Ok(PendingTokens { unread, ..ahead })
            }
            Ok(false) => {
                debug!(target: TARGET, "an enqueued step was rolled back and runs again");
                release(ahead.chosen);
                self.again(cache, ahead.answers)
            }
            Err(error) => {
                release(ahead.chosen);
                roll_back(cache, number);
                Err(error)
            }
        }
    }

    /// Commits an enqueued step; with `unread`, before its values are known to be finite. Returns `false` if the step
    /// was rolled back meanwhile.
    fn commit(
        &self,
        cache: &mut MlxCache,
        number: u64,
        chosen: &ChosenTokens,
        unread: bool,
    ) -> Result<bool> {
        let mut mlx = mlx::enter()?;
        if cache.sequences().is_some() && !unread {
            // The commit checks that all values are finite, and would wait for them without releasing MLX.
            mlx.outside(|| chosen.wait())?;
        }
        let Some(step) = Step::resume(cache, number) else {
            return Ok(false);
        };
        let commit = || if unread { step.commit_unread(&[]) } else { step.commit(&[]) };
        let committed = self.program.0.stream.run(&mlx, commit);
        if committed.is_err() {
            withdraw(cache);
        }
        committed?;
        Ok(true)
    }

    /// Runs the step of the last tokens of these answers.
    fn again(&mut self, cache: &mut MlxCache, answers: Vec<usize>) -> Result<PendingTokens> {
        let of = |index: &usize| {
            let answer = &self.answers[*index];
            (answer.text[answer.done], answer.position(answer.done))
        };
        let (tokens, positions): (Vec<i64>, Vec<i32>) = answers.iter().map(of).unzip();
        let Some(chosen) = self.run(cache, &answers, &tokens, &positions, true)? else {
            fail!(Internal, "a step has chosen no tokens");
        };
        for &index in &answers {
            self.answers[index].done += 1;
        }
        Ok(PendingTokens { answers, chosen, step: None, unread: false })
    }

    /// Runs tokens of these answers, and commits the step. Returns the next tokens if requested.
    pub(super) fn run(
        &mut self,
        cache: &mut MlxCache,
        answers: &[usize],
        tokens: &[i64],
        positions: &[i32],
        choose: bool,
    ) -> Result<Option<ChosenTokens>> {
        for &index in answers {
            let answer = &self.answers[index];
            let (expected, next) =
                (answer.position(answer.done), next_position(cache, answer.sequence)?);
            if next != expected {
                fail!(
                    Position,
                    "the answer continues at position {expected}, but the next position of the cache is \
                     {next}: the cache was changed meanwhile; generate again"
                );
            }
        }
        let mut mlx = mlx::enter()?;
        if choose && self.is_fast(cache, tokens.len()) {
            let program = &self.program.0;
            // Only the last row of an answer is read. If it is not finite, reading the token returns an
            // error.
            let take = |_: &mut mlx::Mlx, ids: &[i32]| {
                let last = &ids[ids.len().saturating_sub(answers.len())..];
                Ok(ChosenTokens::Host(last.to_vec()))
            };
            let text = (tokens, positions);
            let captured = self
                .declare(cache, answers, positions.len())
                .and_then(|()| program.choose_fast(&mut mlx, cache, text, take));
            if captured.is_err() {
                withdraw(cache);
            }
            if let Some(chosen) = captured? {
                return Ok(Some(chosen));
            }
        }
        let batch = Batch { answers, tokens: Tokens::Host(tokens), positions, choose };
        let stream = Arc::clone(&self.program.0);
        self.with_step(&mut mlx, cache, batch, |mlx, chosen, step| {
            if let Some(chosen) = &chosen {
                mlx.outside(|| chosen.wait())?;
            }
            stream.stream.run(mlx, || step.commit(&[]))?;
            Ok(chosen)
        })
    }

    /// Enqueues the step of tokens that are still being computed, for the answers that may go on.
    fn run_ahead(
        &mut self,
        cache: &mut MlxCache,
        coming: &PendingTokens,
    ) -> Result<Option<PendingTokens>> {
        let of_row = |row: usize| &self.answers[coming.answers[row]];
        let rows: Vec<usize> = (0..coming.answers.len())
            .filter(|&row| of_row(row).n_answered() + 1 < self.options.max_tokens)
            .collect();
        let positions: Vec<i32> =
            rows.iter().map(|&row| of_row(row).position(of_row(row).text.len())).collect();
        let answers: Vec<usize> = rows.iter().map(|&row| coming.answers[row]).collect();
        let fits = cache.can_extend(answers.len() as i32);
        if answers.is_empty() || !fits || !cache.can_set_aside() {
            return Ok(None);
        }
        let mut mlx = mlx::enter()?;
        let (ids, below) = self.program.0.stream.run(&mlx, || coming.chosen.at(&rows))?;
        let batch = Batch {
            answers: &answers,
            tokens: Tokens::Device(&ids, below),
            positions: &positions,
            choose: true,
        };
        self.with_step(&mut mlx, cache, batch, |_, chosen, step| {
            Ok(match (chosen, step.set_aside()) {
                (Some(chosen), Ok(number)) => Some(PendingTokens {
                    answers: answers.clone(),
                    chosen,
                    step: Some(number),
                    unread: false,
                }),
                // This cannot happen: the step chooses tokens, and `can_set_aside` was checked above.
                _ => None,
            })
        })
    }
}

/// Rolls back an enqueued step.
pub(super) fn roll_back(cache: &mut MlxCache, number: u64) {
    if cache.resume(number) {
        cache.set_aside();
        cache.abort();
        withdraw(cache);
    }
}

/// Drops unread tokens, under the lock of MLX.
pub(super) fn release(chosen: ChosenTokens) {
    let _held = mlx::hold();
    drop(chosen);
}

#[cfg(test)]
mod tests;
