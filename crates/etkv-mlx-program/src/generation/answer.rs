//! Prompts, and the state of their answers.

use crate::error::{fail, Result};
use etkv::MlxCache;

/// A text to continue.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Prompt {
    /// The sequence to continue; 0 in a cache of one sequence.
    pub sequence: i32,
    /// The tokens that follow the tokens in the sequence, at least one.
    pub tokens: Vec<i64>,
}

impl Prompt {
    /// Returns a prompt of these tokens.
    pub fn new(sequence: i32, tokens: Vec<i64>) -> Self {
        Self { sequence, tokens }
    }
}

/// One prompt and its answer.
pub struct Answer {
    pub sequence: i32,
    /// The prompt and the answer's tokens.
    pub text: Vec<i64>,
    pub n_prompt: usize,
    /// The number of tokens of `text` that have run.
    pub done: usize,
    /// The position of the first token.
    pub start: i32,
    pub ended: bool,
}

impl Answer {
    /// Returns a new answer to a prompt.
    pub fn new(cache: &MlxCache, prompt: Prompt) -> Result<Self> {
        Ok(Self {
            sequence: prompt.sequence,
            start: next_position(cache, prompt.sequence)?,
            n_prompt: prompt.tokens.len(),
            text: prompt.tokens,
            done: 0,
            ended: false,
        })
    }

    /// Returns the tokens of the answer so far.
    pub fn n_answered(&self) -> usize {
        self.text.len() - self.n_prompt
    }

    /// Returns the position of token `n` of the text.
    pub fn position(&self, n: usize) -> i32 {
        self.start.saturating_add(i32::try_from(n).unwrap_or(i32::MAX))
    }
}

/// Refuses prompts that cannot be answered together.
pub fn check_prompts(prompts: &[Prompt]) -> Result<()> {
    if prompts.is_empty() {
        fail!(InvalidArgument, "expected at least one prompt, got none");
    }
    for (index, prompt) in prompts.iter().enumerate() {
        if prompt.tokens.is_empty() {
            fail!(InvalidArgument, "prompt {index} has no tokens, expected at least one");
        }
        if prompts[..index].iter().any(|other| other.sequence == prompt.sequence) {
            fail!(
                InvalidArgument,
                "prompt {index} is the second for sequence {}; expected one prompt for each sequence",
                prompt.sequence
            );
        }
    }
    Ok(())
}

/// Returns the position at which a sequence goes on.
pub fn next_position(cache: &MlxCache, sequence: i32) -> Result<i32> {
    match cache.sequences() {
        Some(cells) => Ok(cells.seq_next(sequence)?),
        None if sequence == 0 => Ok(cache.length()),
        None => {
            fail!(InvalidArgument, "the cache has no sequence {sequence}: it has one sequence, 0")
        }
    }
}
