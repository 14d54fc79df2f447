//! Answers of a program, token by token. The device chooses the tokens.
//!
//! Async decode: the input of a step is the token that the previous step chose on the device. So the next step is
//! enqueued before the host has read that token, and the device does not wait for the host. The step commits when the
//! host requests the next token. If the host requests none, or the answer has ended, the step is rolled back. The
//! cache then holds all tokens that the host received except the last, as if the host had run each step itself.

mod answer;
mod choose;
mod chosen_tokens;
mod device_loop;
mod sampler;
mod warm_up;

use etkv_delegate::Sampling;

pub use self::answer::Prompt;
use self::device_loop::step::{last_rows, withdraw};
pub use self::device_loop::Generation;
use self::sampler::Sampler;

/// Options of generation.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GenerationOptions {
    /// Sampling parameters.
    pub sampling: Sampling,
    /// The maximum tokens of an answer.
    pub max_tokens: usize,
    /// Tokens that end an answer.
    pub stop: Vec<i64>,
    /// Whether a step starts before the host requests its token.
    pub run_ahead: RunAhead,
}

/// Whether a step starts before the host requests its token.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunAhead {
    /// On a GPU, except for captured steps. On a CPU nothing is gained: MLX then copies each buffer that the
    /// previous step still reads.
    #[default]
    Auto,
    /// Each step starts when its token is requested.
    Never,
    /// On a CPU, too.
    Always,
}

impl Default for GenerationOptions {
    fn default() -> Self {
        Self {
            sampling: Sampling::default(),
            max_tokens: 256,
            stop: Vec::new(),
            run_ahead: RunAhead::Auto,
        }
    }
}

/// The reason why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum End {
    /// The token ends the answer.
    Stop,
    /// The answer has the maximum number of tokens.
    Length,
    /// The cache is full.
    Capacity,
}

/// A token of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Generated {
    /// The index of its prompt.
    pub prompt: usize,
    /// The token id.
    pub token: i64,
    /// Set with the last token.
    pub end: Option<End>,
}
