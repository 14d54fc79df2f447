//! Answers of a program, token by token, with the choice of each token on the device.
//!
//! A step does not need the token that the host has: its input is the token that the step before chose, on
//! the device. So the next step starts before the host has read the last token, and the device does
//! not wait for the host. That step is set aside until the host asks for more. If it does not, or the
//! answer has ended, the step is rolled back: the cache holds what the host has, but for the last
//! token, as it does when the host runs each step itself.

mod ahead;
mod answer;
mod choose;
mod device_loop;
mod sampler;
mod step;
mod warm_up;

use etkv_delegate::Sampling;

pub use self::answer::Prompt;
pub use self::device_loop::Generation;
use self::sampler::Sampler;
use self::step::{last_rows, withdraw};

/// How answers are made.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GenerationOptions {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// The most tokens of an answer.
    pub max_tokens: usize,
    /// Tokens that end an answer.
    pub stop: Vec<i64>,
    /// Whether a step starts before the host asks for its token.
    pub run_ahead: RunAhead,
}

/// Whether a step starts before the host asks for its token.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunAhead {
    /// On a GPU, but for steps that are one launch. On a CPU nothing is gained: MLX then copies each buffer
    /// that the step before still reads.
    #[default]
    Auto,
    /// Each step starts when its token is asked for.
    Never,
    /// Also on a CPU.
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
    /// The token is one that ends it.
    Stop,
    /// It has as many tokens as it may have.
    Length,
    /// The cache is full.
    Capacity,
}

/// A token of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Generated {
    /// The index of the prompt that it answers.
    pub prompt: usize,
    /// The token id.
    pub token: i64,
    /// Set with the last token.
    pub end: Option<End>,
}
