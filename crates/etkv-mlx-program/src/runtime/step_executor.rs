//! Executors: the interface for running steps faster than the interpreter, for example as one CUDA graph.
//!
//! A [`StepCompiler`] is passed when a program is loaded, and creates a [`StepExecutor`] for it. Each step is first
//! offered to the executor. If the executor declines, nothing has changed, and the interpreter runs the step.

use mlx_rs::{Array, Dtype};

use super::text_inputs::TextInputs;
use crate::error::Result;
use crate::ir::{Graph, Value};
use etkv::mlx::Mlx;
use etkv::MlxCache;

/// Creates executors of the steps of programs.
pub trait StepCompiler: Sync {
    /// Returns the reason that a program can have no executor, as far as its instructions and dtypes show. Returns
    /// `None` if the program has an executor on a supported device. `graph` is the program after the GPU passes.
    fn why_not(&self, graph: &Graph) -> Option<String>;

    /// Returns an executor of the program's steps on MLX's device, if the program can have one there. `constants` are
    /// the loaded constants of `graph`, by their values.
    fn compile(
        &self,
        mlx: &Mlx,
        graph: &Graph,
        constants: &[Option<Array>],
    ) -> Option<Box<dyn StepExecutor>>;
}

/// Runs the steps of one program.
pub trait StepExecutor: Send + Sync {
    /// Returns the inputs and outputs of the program.
    fn signature(&self) -> &StepSignature;

    /// Returns whether the executor will probably run a step of this number of tokens on this cache.
    fn suits(&self, cache: &MlxCache, tokens: usize) -> bool;

    /// Runs a step on the cache, passes the result to `take`, and commits the step if `take` succeeds. Returns false,
    /// with the cache unchanged, if the executor declines the step.
    ///
    /// # Errors
    /// Those of the cache for positions that it refuses, those of `take`, and
    /// [`Backend`](etkv::Status::Backend). The step is rolled back.
    fn try_step(
        &self,
        mlx: &mut Mlx,
        constants: &[Option<Array>],
        cache: &mut MlxCache,
        tokens: StepTokens,
        wanted: RequestedOutputs,
        take: &mut TakeOutputs<'_>,
    ) -> Result<bool>;
}

/// Receives the result of a step.
pub type TakeOutputs<'a> = dyn FnMut(&mut Mlx, StepOutputs) -> Result<()> + 'a;

/// The inputs and outputs of a program whose steps have an executor.
#[derive(Debug, Clone, PartialEq)]
pub struct StepSignature {
    /// The inputs of tokens and positions.
    pub text: TextInputs,
    /// The inputs of rows, such as hidden states, in the order of [`StepTokens::rows`].
    pub rows: Vec<RowsInput>,
    /// The dtype of all outputs.
    pub dtype: Dtype,
    /// The index of the logits among the outputs.
    pub logits_at: usize,
    /// Whether hidden states are the other output.
    pub gives_hidden: bool,
}

/// An input `[1, T, width]`: a row for each token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowsInput {
    /// The value of the input in the graph.
    pub value: Value,
    /// The number of elements of a row.
    pub width: usize,
    /// The dtype of the elements.
    pub dtype: Dtype,
}

/// The host's inputs for each token of a step.
#[derive(Debug, Clone, Copy)]
pub struct StepTokens<'a> {
    /// Token ids.
    pub ids: &'a [i64],
    /// The positions of the tokens.
    pub positions: &'a [i32],
    /// The rows of each input in [`StepSignature::rows`], as bytes of its dtype.
    pub rows: &'a [&'a [u8]],
}

/// The result that the host requests from a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestedOutputs {
    /// The logits of each token.
    Logits,
    /// The logits of the last token.
    LastLogits,
    /// The argmax of each token's logits.
    ArgmaxIds,
}

/// The result of a step.
pub enum StepOutputs<'a> {
    /// Logits `[1, rows, vocabulary]`, and hidden states `[1, tokens, width]` if the program returns them.
    Logits(Rows<'a>, Option<Rows<'a>>),
    /// An id for each token, negative if its logits are not finite.
    ArgmaxIds(&'a [i32]),
}

/// Bytes of the program's dtype, and their shape.
pub type Rows<'a> = (&'a [u8], [i32; 3]);
