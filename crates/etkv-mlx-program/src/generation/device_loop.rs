//! Answers, token by token.

mod ahead;
pub(super) mod step;

use etkv_core::CacheConfig;
use etkv_delegate::LogitsRows;

use self::ahead::{release, roll_back, PendingTokens};
use super::answer::{check_prompts, Answer, Prompt};
use super::chosen_tokens::ChosenTokens;
use super::sampler::Sampler;
use super::{End, Generated, GenerationOptions};
use crate::error::{fail, Error, Result};
use crate::runtime::{Program, TextInputs};
use etkv::mlx;
use etkv::ProgramCache;

/// Answers to one prompt, or to several prompts in one cache of sequences.
///
/// The host may change the cache between two tokens, for example by a step of another sequence: the step that was
/// enqueued ahead then runs again. If the answer's sequence itself changed, the next call fails.
pub struct Generation {
    program: Program,
    cache: ProgramCache,
    inputs: TextInputs,
    sampler: Sampler,
    options: GenerationOptions,
    answers: Vec<Answer>,
    /// The first token after each prompt that has been read.
    firsts: Vec<ChosenTokens>,
    ahead: Option<PendingTokens>,
    /// The error of tokens that could not be read. The answers cannot go on after this error.
    broken: Option<Error>,
    /// The maximum tokens of a step of a prompt.
    chunk: usize,
}

impl Generation {
    /// Prepares answers by a program that was loaded with a cache. Runs nothing yet.
    ///
    /// # Errors
    /// - [`Unsupported`](etkv::Status::Unsupported) for a program that is no language model.
    /// - [`InvalidArgument`](etkv::Status::InvalidArgument) for no prompt, a prompt without tokens, two prompts for
    ///   one sequence, several prompts for a program that returns only the last row of logits, and options out of
    ///   range.
    pub fn new(
        program: &Program,
        prompts: Vec<Prompt>,
        options: GenerationOptions,
    ) -> Result<Self> {
        options.sampling.check()?;
        let inputs = TextInputs::find(&program.0.inputs)?;
        let Some(cache) = program.0.cache.clone() else {
            fail!(NoCache, "cannot choose tokens with a program that was loaded without a cache");
        };
        check_prompts(&prompts)?;
        if prompts.len() > 1 && program.0.logits == LogitsRows::Last {
            fail!(
                InvalidArgument,
                "{} prompts need a row of logits each, and the program was loaded with logits=last; \
                 load it with logits=all or proposed",
                prompts.len()
            );
        }
        if inputs.most.is_some_and(|most| prompts.len() > most.max(1) as usize) {
            fail!(
                InvalidArgument,
                "cannot answer {} prompts together: a step of the program has at most {} tokens",
                prompts.len(),
                inputs.most.unwrap_or_default()
            );
        }
        let (chunk, answers) = {
            let cache = cache.lock()?;
            let n: usize = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
            if !i32::try_from(n).is_ok_and(|n| cache.can_extend(n)) {
                fail!(
                    Capacity,
                    "the prompts have {n} tokens, but {} of {} positions of the cache are free",
                    cache.capacity() - cache.length(),
                    cache.capacity()
                );
            }
            let chunk = inputs.most.unwrap_or(CacheConfig::DEFAULT_MAX_STEP_TOKENS);
            let answers = prompts.into_iter().map(|prompt| Answer::new(&*cache, prompt));
            (
                chunk.min(cache.config().step_limit()).max(1) as usize,
                answers.collect::<Result<_>>()?,
            )
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
            chunk,
        })
    }

    /// Returns the number of prompt tokens that have not run yet.
    pub fn waiting(&self) -> usize {
        self.answers.iter().map(|answer| answer.n_prompt.saturating_sub(answer.done)).sum()
    }

    /// Runs the next step of the prompts. Returns the number of prompt tokens that have not run yet.
    ///
    /// # Errors
    /// Those of [`Program::execute`]. Earlier steps stay committed: the host may call again, or roll the
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
            let chosen = self.program.0.stream.run(&mlx, || ChosenTokens::joined(firsts))?;
            let answers = (0..self.answers.len()).collect();
            self.ahead = Some(PendingTokens { answers, chosen, step: None, unread: false });
        }
        Ok(waiting)
    }

    /// Runs the rest of the prompts, and returns the next token of each answer that has not ended: none once all
    /// answers have ended.
    ///
    /// # Errors
    /// Those of [`Program::execute`]; [`Position`](etkv::Status::Position) if the cache no longer holds the
    /// text so far, and [`Backend`](etkv::Status::Backend) for logits that are not finite.
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
        let PendingTokens { answers, chosen, .. } = self.advance(active)?;
        let taken = read(chosen).and_then(|ids| self.take(&answers, &ids));
        if let Err(error) = &taken {
            self.pause();
            self.broken = Some(error.clone());
        }
        taken
    }

    /// Rolls back the step that was enqueued ahead, if there is one. The cache then holds the prompts that have been
    /// read, and the tokens of each answer except the last. [`next_tokens`](Self::next_tokens) goes on from there.
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

    /// Appends the computed tokens to the texts, and returns which answers have ended.
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

/// Waits for tokens, and returns their ids.
pub(super) fn read(chosen: ChosenTokens) -> Result<Vec<i64>> {
    let mut mlx = match mlx::enter() {
        Ok(mlx) => mlx,
        Err(error) => {
            release(chosen);
            return Err(error);
        }
    };
    let ids = mlx.outside(|| chosen.wait()).and_then(|()| chosen.ids());
    // The arrays are dropped before other threads may use MLX.
    drop(chosen);
    ids
}
