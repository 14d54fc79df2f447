//! A loaded program. It is loaded once, and run once for each step.

mod bound;
mod fast_step;
mod inputs;
mod load;

use std::sync::Arc;

use etkv_delegate::{Argument, Host, LoadOptions, LogitsRows};
use mlx_rs::transforms::async_eval;
use mlx_rs::Array;
use smallvec::SmallVec;
use tracing::{debug_span, warn};

use super::buffers::Buffers;
use super::constants::ConstantSource;
use super::schedule::Schedule;
use super::step_executor::{RequestedOutputs, StepCompiler, StepExecutor};
use super::stream::ProgramStream;
use super::text_inputs::{TextInputs, Tokens};
use crate::error::{fail, Error, Result};
use crate::frontend::decode::decode;
use crate::frontend::payload;
use crate::ir::InputSpec;
use crate::ops::frame::{Frame, Output, Outputs, StepState};
use crate::TARGET;
use etkv::mlx::{self, Mlx};
use etkv::{MlxCache, ProgramCache, Step};

/// A loaded program. Clones are handles on the same program, which lives until the last clone is dropped.
#[derive(Clone)]
pub struct Program(pub(crate) Arc<LoadedProgram>);

/// The parts of a loaded program.
pub struct LoadedProgram {
    pub(crate) inputs: Vec<InputSpec>,
    pub(crate) constants: Vec<Option<Array>>,
    /// The executor, if there is one. Each step is offered to it first.
    pub(crate) executor: Option<Box<dyn StepExecutor>>,
    main: Schedule,
    n_values: u32,
    n_ints: u32,
    pub(crate) buffers: Buffers,
    pub(crate) cache: Option<ProgramCache>,
    /// Which rows of logits the program returns, as requested at load.
    pub(crate) logits: LogitsRows,
    /// The index of the logits in the outputs, if any output may be logits.
    logits_at: Option<usize>,
    /// Whether all rows of logits are computed, but only the last one is returned.
    cuts_logits: bool,
    pub(crate) stream: ProgramStream,
}

// SAFETY: arrays and the stream are used only under the lock of MLX, by one thread at a time.
unsafe impl Send for LoadedProgram {}
// SAFETY: as above.
unsafe impl Sync for LoadedProgram {}

impl Program {
    /// Decodes a payload, loads its constants and binds its cache. If the passes are the default ones and the device
    /// is supported, `steps` creates an executor of the program's steps.
    ///
    /// # Errors
    /// - [`Program`](etkv::Status::Program) for a payload that is damaged or foreign.
    /// - [`Version`](etkv::Status::Version) for one of a newer format.
    /// - [`Unsupported`](etkv::Status::Unsupported) for a program that needs operations which this build lacks.
    /// - [`NoCache`](etkv::Status::NoCache) for an unknown key, [`Kind`](etkv::Status::Kind) for a cache of
    ///   another backend, and [`Shape`](etkv::Status::Shape) for a cache with other layers.
    pub fn load(
        payload: &[u8],
        source: &mut dyn ConstantSource,
        options: &LoadOptions,
        steps: Option<&dyn StepCompiler>,
    ) -> Result<Self> {
        let key = options.cache_key.as_deref();
        let span = debug_span!(target: TARGET, "load", bytes = payload.len(), key, logits = ?options.logits, passes = ?options.passes);
        span.in_scope(|| Self::load_now(payload, source, options, steps)).inspect_err(|error| {
            warn!(target: TARGET, status = ?error.status(), %error, "a program is refused");
        })
    }

    /// Verifies and decodes a payload, as [`load`](Self::load) does. Reads no constants and does
    /// not use MLX.
    ///
    /// # Errors
    /// [`Program`](etkv::Status::Program) and [`Unsupported`](etkv::Status::Unsupported).
    pub fn check(payload: &[u8]) -> Result<()> {
        decode(payload::read(payload)?).map(|_| ())
    }

    /// Returns the number of inputs.
    pub fn n_inputs(&self) -> usize {
        self.0.inputs.len()
    }

    /// Returns the number of outputs.
    pub fn n_outputs(&self) -> usize {
        self.0.main.chain().outputs.len() - self.0.buffers.len()
    }

    /// Zeroes the buffers that the program keeps between calls.
    ///
    /// # Errors
    /// [`Backend`](etkv::Status::Backend).
    pub fn reset(&self) -> Result<()> {
        let _held = mlx::hold();
        self.0.buffers.reset();
        Ok(())
    }

    /// Runs the program once, converts each output tensor to the dtype in `output_types` (numbers of ExecuTorch's
    /// `ScalarType`, one for each output), and writes the outputs to the memory that `host` returns. With a cache,
    /// this is one step on it. The step commits if `host` accepts the outputs, and is rolled back otherwise.
    ///
    /// Other threads may use MLX while this one waits for the device and copies outputs.
    ///
    /// # Errors
    /// - [`InvalidArgument`](etkv::Status::InvalidArgument), [`Shape`](etkv::Status::Shape) and
    ///   [`Dtype`](etkv::Status::Dtype) for inputs that do not fit.
    /// - Those of the cache for positions that it refuses, and [`NoCache`](etkv::Status::NoCache) if the
    ///   program needs a cache and has none.
    /// - [`Backend`](etkv::Status::Backend), and those of `host`.
    pub fn execute(
        &self,
        inputs: &[Argument],
        output_types: &[i8],
        host: &mut dyn Host,
    ) -> Result<()> {
        let span = debug_span!(target: TARGET, "forward");
        span.in_scope(|| self.0.run(inputs, output_types, host)).inspect_err(|error| {
            warn!(target: TARGET, status = ?error.status(), %error, "a forward fails");
        })
    }
}

impl LoadedProgram {
    fn run(&self, inputs: &[Argument], output_types: &[i8], host: &mut dyn Host) -> Result<()> {
        let mut cache = self.cache.as_ref().map(ProgramCache::lock).transpose()?;
        let last_row_only = self.gives_last_row(cache.as_deref());
        // This is dropped after the arrays that need it.
        let mut mlx = mlx::enter()?;
        if let Some(cache) = cache.as_deref_mut() {
            let wanted = match last_row_only || self.cuts_logits {
                true => RequestedOutputs::LastLogits,
                false => RequestedOutputs::Logits,
            };
            if self.run_fast(&mut mlx, cache, inputs, wanted, output_types, host)? {
                return Ok(());
            }
        }
        let step = match cache.as_deref_mut() {
            Some(cache) => StepState::Ready(cache),
            None => StepState::NoCache,
        };
        let frame = Frame::new(&mlx, self.n_values, self.n_ints, &self.constants, step);
        let (made, kept, step) =
            self.stream.run(&mlx, || self.start(frame, inputs, last_row_only, output_types))?;
        mlx.outside(|| made.iter().try_for_each(Output::wait))
            .and_then(|()| mlx.outside(|| kept.iter().try_for_each(mlx::wait)))
            .inspect_err(|error| self.buffers.give_up(error))?;
        for (index, output) in made.iter().enumerate() {
            output.give(&mut mlx, index, host)?;
        }
        match step {
            Some(step) => self.stream.run(&mlx, || Ok(step.commit(&[])?)),
            None => Ok(()),
        }
    }

    /// Returns whether the next step returns only the last token's row of logits: the program was loaded for that,
    /// and the step is text of one sequence.
    fn gives_last_row(&self, cache: Option<&MlxCache>) -> bool {
        let sequences = cache.and_then(|cache| cache.sequences());
        self.logits == LogitsRows::Proposed
            && sequences.is_none_or(|sequences| sequences.awaits_text())
    }

    /// Runs the instructions, and starts the computation of the outputs and the buffers.
    fn start<'a>(
        &self,
        mut frame: Frame<'_, 'a>,
        inputs: &[Argument],
        last_row_only: bool,
        output_types: &[i8],
    ) -> Result<(Outputs, Vec<Array>, Option<Step<'a>>)> {
        frame.set_last_row_only(last_row_only);
        inputs::bind_inputs(&self.inputs, inputs, &mut frame)?;
        let found = self.buffers.bind(&mut frame)?;
        self.main.run(&mut frame)?;
        let (mut made, step) = frame.finish(&self.main.chain().outputs)?;
        let left = made.len() - self.buffers.len();
        let buffers: SmallVec<[Output; 4]> = made.drain(left..).collect();
        if made.len() != output_types.len() {
            let n = output_types.len();
            fail!(InvalidArgument, "expected {} outputs, got {n}", made.len());
        }
        if let Some(at) = self.logits_at.filter(|_| last_row_only || self.cuts_logits) {
            made[at].keep_last_row()?;
        }
        let made = made
            .into_iter()
            .zip(output_types)
            .map(|(output, &scalar_type)| output.of_type(scalar_type))
            .collect::<Result<Outputs>>()?;
        // Drop the old values, so that MLX writes in place.
        drop(found);
        let kept = self.buffers.keep(buffers)?;
        let tensors = made.iter().filter_map(Output::tensor).chain(&kept);
        let started = match &step {
            Some(step) => {
                step.schedule(&tensors.collect::<SmallVec<[_; 4]>>()).map_err(Error::from)
            }
            None => async_eval(tensors).map_err(Error::from),
        };
        started.inspect_err(|error| self.buffers.give_up(error))?;
        Ok((made, kept, step))
    }
}

impl LoadedProgram {
    /// Runs the instructions of a step of a language model. Returns its logits and the step. With
    /// `last_row_only` the logits may have only the last row.
    ///
    /// # Errors
    /// Those of [`Program::execute`].
    pub(crate) fn logits<'a>(
        &self,
        mlx: &Mlx,
        inputs: &TextInputs,
        tokens: &Tokens,
        positions: &[i32],
        last_row_only: bool,
        cache: &'a mut MlxCache,
    ) -> Result<(Array, Step<'a>)> {
        let step = StepState::Ready(cache);
        let mut frame = Frame::new(mlx, self.n_values, self.n_ints, &self.constants, step);
        frame.set_last_row_only(last_row_only);
        if self.buffers.len() > 0 {
            fail!(Unsupported, "cannot choose tokens: the program keeps its cache in the graph");
        }
        inputs.bind(&mut frame, tokens, positions)?;
        self.main.run(&mut frame)?;
        // Other outputs are never computed.
        let outputs = &self.main.chain().outputs;
        let logits = self.logits_at.and_then(|at| outputs.get(at..=at)).unwrap_or_default();
        match frame.finish(logits)? {
            (made, Some(step)) => match made.into_iter().next() {
                Some(Output::Tensor(logits)) => Ok((logits, step)),
                _ => fail!(Unsupported, "cannot choose tokens: no output can be logits"),
            },
            (_, None) => {
                fail!(
                    Unsupported,
                    "cannot choose tokens: the program has no layers that read a cache"
                )
            }
        }
    }
}

impl Drop for LoadedProgram {
    fn drop(&mut self) {
        let _held = mlx::hold();
        if let Ok(mlx) = mlx::enter() {
            mlx.publish_kernels();
        }
        self.executor = None;
        self.constants.clear();
        self.buffers.reset();
        self.cache = None;
    }
}
