//! The steps of answers, one of them ahead of the host.

use std::sync::Arc;

use etkv_host::LogitsRows;
use tracing::debug;

use super::answer::{check_prompts, next_position, Answer, Prompt};
use super::sampler::{Chosen, Sampler};
use super::step::{withdraw, Batch};
use super::text_inputs::{TextInputs, Tokens};
use super::{End, Generated, GenerationOptions};
use crate::backend::{MlxCache, ProgramCache, Step};
use crate::error::{fail, Error, Result};
use crate::mlx;
use crate::program::execute::Program;
use crate::program::TARGET;

/// The most tokens of a step where neither the program nor the cache says it.
const CHUNK: usize = 512;

/// Tokens that are being computed.
struct Ahead {
    /// The answers that they continue.
    answers: Vec<usize>,
    chosen: Chosen,
    /// The number of the step that computes them, if it waits to be committed.
    step: Option<u64>,
    /// Whether that step is committed and its values are not read.
    unread: bool,
}

/// Answers to one prompt, or to several in one cache of sequences.
///
/// A cache that the host changes while it waits for the next token, such as by a step of its own on
/// another sequence, is no error: the step that ran ahead runs again. If the answer's own sequence
/// changed, the next call fails.
pub struct Generation {
    pub(super) program: Program,
    cache: ProgramCache,
    pub(super) inputs: TextInputs,
    pub(super) sampler: Sampler,
    pub(super) options: GenerationOptions,
    pub(super) answers: Vec<Answer>,
    /// The first token of each prompt that was read.
    firsts: Vec<Chosen>,
    ahead: Option<Ahead>,
    /// The error of tokens that could not be read, after which the answers cannot go on.
    broken: Option<Error>,
    /// The most tokens of a step of a prompt.
    chunk: usize,
}

impl Generation {
    /// Prepares answers by a program that was loaded with a cache. Nothing runs.
    ///
    /// # Errors
    /// - [`Unsupported`](crate::Status::Unsupported) for a program that is no language model.
    /// - [`InvalidArgument`](crate::Status::InvalidArgument) for no prompt, a prompt without tokens,
    ///   several prompts for one sequence, several with a program that was loaded for the last row of
    ///   the logits, and options out of their range.
    /// - [`Capacity`](crate::Status::Capacity) if the prompts do not fit the cache.
    pub fn new(
        program: &Program,
        prompts: Vec<Prompt>,
        options: GenerationOptions,
    ) -> Result<Self> {
        options.sampling.check()?;
        let inputs = TextInputs::find(&program.0.inputs)?;
        let Some(cache) = program.0.cache.clone() else {
            fail!(NoCache, "cannot generate with a program that was loaded without a cache");
        };
        check_prompts(&prompts)?;
        if prompts.len() > 1 && program.0.logits == LogitsRows::Last {
            fail!(
                InvalidArgument,
                "{} prompts need a row of logits each, and the program was loaded with logits=last; \
                 load it with logits=all",
                prompts.len()
            );
        }
        if inputs.most.is_some_and(|most| prompts.len() > most.max(1) as usize) {
            fail!(
                InvalidArgument,
                "there are {} prompts, and a step of the program takes at most {} tokens",
                prompts.len(),
                inputs.most.unwrap_or_default()
            );
        }
        let mut limits = vec![inputs.most.map_or(CHUNK, |most| most.max(1) as usize)];
        let answers = {
            let cache = cache.lock()?;
            let n: usize = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
            if !i32::try_from(n).is_ok_and(|n| cache.can_extend(n)) {
                fail!(
                    Capacity,
                    "the prompts have {n} tokens, the cache has room for {} of {}",
                    cache.capacity() - cache.length(),
                    cache.capacity()
                );
            }
            let config = cache.config();
            if config.max_step_tokens > 0 {
                limits.push(config.max_step_tokens as usize);
            }
            prompts.into_iter().map(|prompt| Answer::new(&*cache, prompt)).collect::<Result<_>>()?
        };
        Ok(Self {
            program: program.clone(),
            cache,
            inputs,
            sampler: Sampler::new(options.sampling.clone()),
            options,
            answers,
            firsts: Vec::new(),
            ahead: None,
            broken: None,
            chunk: limits.into_iter().min().unwrap_or(CHUNK),
        })
    }

    /// Returns the tokens of the prompts that have not run.
    pub fn waiting(&self) -> usize {
        self.answers.iter().map(|answer| answer.n_prompt.saturating_sub(answer.done)).sum()
    }

    /// Runs the next step of the prompts, and returns the tokens that then have not run.
    ///
    /// # Errors
    /// Those of [`Program::execute`]. The steps before stay: the host may call again, or roll the
    /// sequence back.
    pub fn read_prompts(&mut self) -> Result<usize> {
        let reading = |answer: &Answer| answer.done < answer.n_prompt;
        let Some(index) = self.answers.iter().position(reading) else {
            return Ok(0);
        };
        let answer = &self.answers[index];
        let end = answer.n_prompt.min(answer.done + self.chunk);
        let positions: Vec<i32> = (answer.done..end).map(|n| answer.position(n)).collect();
        let tokens = answer.text[answer.done..end].to_vec();
        let choose = end == answer.n_prompt;
        let shared = self.cache.clone();
        let first = self.run(&mut *shared.lock()?, &[index], &tokens, &positions, choose)?;
        self.answers[index].done = end;
        self.firsts.extend(first);
        let waiting = self.waiting();
        if waiting == 0 {
            let mlx = mlx::enter()?;
            let firsts = std::mem::take(&mut self.firsts);
            let chosen = self.program.0.stream.run(&mlx, || Chosen::joined(firsts))?;
            let answers = (0..self.answers.len()).collect();
            self.ahead = Some(Ahead { answers, chosen, step: None, unread: false });
        }
        Ok(waiting)
    }

    /// Returns the next token of each answer that goes on. Runs what has not run of the prompts. Empty
    /// once all answers have ended.
    ///
    /// # Errors
    /// Those of [`Program::execute`], [`Position`](crate::Status::Position) if the cache no longer
    /// holds the text so far, and [`Backend`](crate::Status::Backend) for logits that are not finite.
    pub fn next_tokens(&mut self) -> Result<Vec<Generated>> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        while self.read_prompts()? > 0 {}
        if self.options.max_tokens == 0 {
            self.answers.iter_mut().for_each(|answer| answer.ended = true);
        }
        let active: Vec<usize> =
            (0..self.answers.len()).filter(|&index| !self.answers[index].ended).collect();
        if active.is_empty() {
            return Ok(Vec::new());
        }
        let Ahead { answers, chosen, .. } = self.advance(active)?;
        let taken = read(chosen).and_then(|ids| self.take(&answers, &ids));
        if let Err(error) = &taken {
            self.pause();
            self.broken = Some(error.clone());
        }
        taken
    }

    /// Rolls back the step that runs ahead, if there is one. The cache then holds the prompts that were
    /// read and all tokens of the answers but the last of each. [`next_tokens`](Self::next_tokens) goes on from there.
    pub fn pause(&mut self) {
        let Some(number) = self.ahead.as_ref().and_then(|ahead| ahead.step) else {
            return;
        };
        let _held = mlx::hold();
        self.ahead = None;
        // A poisoned cache has no step.
        if let Ok(mut cache) = self.cache.lock() {
            roll_back(&mut *cache, number);
        }
    }

    /// Commits the step that computes the next tokens of the answers that go on, `active`, or runs it.
    /// Then starts the step behind it. Returns the tokens, perhaps not computed yet.
    fn advance(&mut self, active: Vec<usize>) -> Result<Ahead> {
        let shared = self.cache.clone();
        // Until the values of the step are read: others must not build on it before.
        let mut cache = shared.lock()?;
        let coming = match self.ahead.take() {
            Some(ahead) => self.settled(&mut *cache, ahead)?,
            None => self.again(&mut *cache, active)?,
        };
        if self.options.ahead {
            // Where it fails, nothing runs ahead: the next call runs the step, and tells why if it fails
            // again.
            match self.run_ahead(&mut *cache, &coming) {
                Ok(next) => self.ahead = next,
                Err(error) => debug!(target: TARGET, %error, "no step runs ahead"),
            }
        }
        if coming.unread {
            self.check(&mut *cache, coming)
        } else {
            Ok(coming)
        }
    }

    /// Reads whether the values of the committed step are finite, and waits for them. If they are not,
    /// neither it nor the step behind it is there.
    fn check(&mut self, cache: &mut MlxCache, mut coming: Ahead) -> Result<Ahead> {
        // Outside of MLX. If it fails, reading the tokens tells why.
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
        Err(waited.err().unwrap_or(error.into()))
    }

    /// Commits the step that computes these tokens. Runs it again if it was rolled back meanwhile.
    fn settled(&mut self, cache: &mut MlxCache, mut ahead: Ahead) -> Result<Ahead> {
        let Some(number) = ahead.step.take() else {
            return Ok(ahead);
        };
        let late = cache.can_commit_unread();
        match self.commit(cache, number, &ahead.chosen, late) {
            Ok(true) => {
                for &index in &ahead.answers {
                    self.answers[index].done += 1;
                }
                Ok(Ahead { unread: late, ..ahead })
            }
            Ok(false) => {
                debug!(target: TARGET, "a step that ran ahead runs again");
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

    /// Commits a step that was set aside, `late`: before its values are read. Returns `false` if it was
    /// rolled back meanwhile.
    fn commit(
        &self,
        cache: &mut MlxCache,
        number: u64,
        chosen: &Chosen,
        late: bool,
    ) -> Result<bool> {
        let mut mlx = mlx::enter()?;
        if cache.sequences().is_some() && !late {
            // Its commit reads whether all values are finite, and would wait for them in MLX.
            mlx.outside(|| chosen.wait())?;
        }
        let Some(step) = Step::resume(cache, number) else {
            return Ok(false);
        };
        let commit = || if late { step.commit_unread(&[]) } else { step.commit(&[]) };
        let committed = self.program.0.stream.run(&mlx, commit);
        if committed.is_err() {
            withdraw(cache);
        }
        committed?;
        Ok(true)
    }

    /// Runs the step of the last tokens of these answers.
    fn again(&mut self, cache: &mut MlxCache, answers: Vec<usize>) -> Result<Ahead> {
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
        Ok(Ahead { answers, chosen, step: None, unread: false })
    }

    /// Runs tokens of these answers, and commits the step. Returns the tokens that follow if they are
    /// asked for.
    fn run(
        &mut self,
        cache: &mut MlxCache,
        answers: &[usize],
        tokens: &[i64],
        positions: &[i32],
        choose: bool,
    ) -> Result<Option<Chosen>> {
        for &index in answers {
            let answer = &self.answers[index];
            let (expected, next) =
                (answer.position(answer.done), next_position(cache, answer.sequence)?);
            if next != expected {
                fail!(
                    Position,
                    "the answer goes on at position {expected}, and the cache goes on at {next}: it \
                     was changed meanwhile; generate anew"
                );
            }
        }
        let mut mlx = mlx::enter()?;
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

    /// Starts the step behind tokens that are being computed, for the answers that may go on.
    fn run_ahead(&mut self, cache: &mut MlxCache, coming: &Ahead) -> Result<Option<Ahead>> {
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
        let ids = self.program.0.stream.run(&mlx, || coming.chosen.at(&rows))?;
        let batch = Batch {
            answers: &answers,
            tokens: Tokens::Device(&ids, coming.chosen.below),
            positions: &positions,
            choose: true,
        };
        self.with_step(&mut mlx, cache, batch, |_, chosen, step| {
            Ok(match (chosen, step.set_aside()) {
                (Some(chosen), Ok(number)) => Some(Ahead {
                    answers: answers.clone(),
                    chosen,
                    step: Some(number),
                    unread: false,
                }),
                // Such a cache was passed by above.
                _ => None,
            })
        })
    }

    /// Takes the tokens that were computed into the texts, and tells which answers have ended.
    fn take(&mut self, answers: &[usize], ids: &[i64]) -> Result<Vec<Generated>> {
        let cache = self.cache.lock()?;
        let mut generated = Vec::new();
        for (&index, &token) in answers.iter().zip(ids) {
            let answer = &mut self.answers[index];
            answer.text.push(token);
            let end = if self.options.stop.contains(&token) {
                Some(End::Stop)
            } else {
                (answer.n_answered() >= self.options.max_tokens).then_some(End::Length)
            };
            generated.push(Generated { prompt: index, token, end });
        }
        let going = generated.iter().filter(|one| one.end.is_none()).count();
        let fits = cache.can_extend(going as i32);
        drop(cache);
        for one in &mut generated {
            one.end = one.end.or((!fits).then_some(End::Capacity));
            self.answers[one.prompt].ended = one.end.is_some();
        }
        let ran_on = self
            .ahead
            .as_ref()
            .is_some_and(|ahead| ahead.answers.iter().any(|&index| self.answers[index].ended));
        if ran_on {
            self.pause();
        }
        Ok(generated)
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.pause();
        let _held = mlx::hold();
        self.firsts.clear();
        self.ahead = None;
        self.sampler.release();
    }
}

/// Rolls a step back that was set aside.
fn roll_back(cache: &mut MlxCache, number: u64) {
    if cache.resume(number) {
        cache.set_aside();
        cache.abort();
        withdraw(cache);
    }
}

/// Waits for tokens, and returns their ids.
fn read(chosen: Chosen) -> Result<Vec<i64>> {
    let mut mlx = match mlx::enter() {
        Ok(mlx) => mlx,
        Err(error) => {
            release(chosen);
            return Err(error);
        }
    };
    let ids = mlx.outside(|| chosen.wait()).and_then(|()| chosen.ids());
    // Before MLX is free.
    drop(chosen);
    ids
}

/// Drops tokens that are not read, under the lock of MLX.
fn release(chosen: Chosen) {
    let _held = mlx::hold();
    drop(chosen);
}

#[cfg(test)]
mod tests;
