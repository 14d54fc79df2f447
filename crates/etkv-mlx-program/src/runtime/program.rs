//! A loaded program. It is loaded once, and run once a step.

mod bound;
mod fast_step;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use etkv_core::{CacheRegistry, SharedCache};
use etkv_delegate::{Argument, Host, LoadOptions, LogitsRows, Passes};
use mlx_rs::transforms::async_eval;
use mlx_rs::{Array, Dtype};
use smallvec::SmallVec;
use tracing::{debug, debug_span, info, warn};

use super::buffers::Buffers;
use super::constants::{self, ConstantSource};
use super::schedule::Schedule;
use super::step_executor::{RequestedOutputs, StepCompiler, StepExecutor};
use super::stream::ProgramStream;
use super::text_inputs::{TextInputs, Tokens};
use crate::dtype::{self, dtype_of};
use crate::error::{fail, Error, Result, Status};
use crate::frontend::decode::decode;
use crate::frontend::payload;
use crate::ir::{Dim, Graph, InputSpec, Op, RecurrentCall, Value};
use crate::ops::frame::{Frame, HostInts, Output, Outputs, StepState};
use crate::passes::{self, by_capacity, Layout, Target};
use crate::TARGET;
use etkv::mlx::{self, Mlx};
use etkv::{MlxCache, ProgramCache, Step, MLX_BACKEND};

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
    /// - [`Program`](Status::Program) for a payload that is damaged or foreign.
    /// - [`Version`](Status::Version) for one of a newer format.
    /// - [`Unsupported`](Status::Unsupported) for a program that needs operations which this build lacks.
    /// - [`NoCache`](Status::NoCache) for an unknown key, [`Kind`](Status::Kind) for a cache of
    ///   another backend, and [`Shape`](Status::Shape) for a cache with other layers.
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

    fn load_now(
        payload: &[u8],
        source: &mut dyn ConstantSource,
        options: &LoadOptions,
        steps: Option<&dyn StepCompiler>,
    ) -> Result<Self> {
        let mut graph = decode(payload::read(payload)?)?;
        // The cache is bound before the constants are loaded, because their load takes longest.
        let bound = options.cache_key.as_deref().map(|key| bind(&mut graph, key)).transpose()?;
        let (shared, cache) = bound.unzip();
        let mlx = mlx::enter()?;
        mlx.run(|| {
            let target = Target {
                on_gpu: mlx.on_gpu() || options.passes == Passes::Gpu,
                last_token_only: options.logits == LogitsRows::Last,
                only_needed: options.passes == Passes::None,
            };
            let scalars = constants::scalars(&graph, source);
            let (layouts, cuts_logits) = prepare(&mut graph, target, &scalars)?;
            let logits_at = match passes::logits_output(&graph) {
                Ok((at, _)) => Some(at),
                Err(error) if options.logits == LogitsRows::Proposed => return Err(error),
                Err(_) => None,
            };
            let constants = load_constants(&mlx, &mut graph, &layouts, source)?;
            // Recurrent layers are not captured: the interpreter runs their programs.
            let can_compile = options.passes == Passes::Default
                && cache.is_some()
                && recurrent_calls(&graph).next().is_none();
            let steps = steps.filter(|_| can_compile);
            let executor = steps.and_then(|steps| steps.compile(&mlx, &graph, &constants));
            // After the executor, because executors choose the rows to copy themselves, and do not support this pass.
            if options.logits == LogitsRows::Proposed && options.passes != Passes::None {
                passes::leave_out_unwanted_rows(&mut graph);
            }
            if target.on_gpu && !target.only_needed && executor.is_none() {
                passes::fuse_launches(&mut graph, &constants);
            }
            info!(
                target: TARGET,
                instructions = graph.main.instructions.len(),
                constants = constants.iter().flatten().count(),
                bytes = constants.iter().flatten().map(Array::nbytes).sum::<usize>(),
                "a program is loaded"
            );
            let n_kept = (graph.constants.len() + tensor_inputs(&graph.inputs)) as u32;
            let buffers = std::mem::take(&mut graph.buffers);
            let buffers = Buffers::new(options.buffers.clone(), buffers);
            let program = Self(Arc::new(LoadedProgram {
                inputs: graph.inputs,
                constants,
                executor,
                main: Schedule::new(graph.main, n_kept),
                n_values: graph.n_values,
                n_ints: graph.n_ints,
                buffers,
                cache,
                logits: options.logits,
                logits_at,
                cuts_logits,
                stream: ProgramStream::new(&mlx)?,
            }));
            bound::add_named(&program);
            if let Some(shared) = &shared {
                shared.bind(&program.0);
            }
            Ok(program)
        })
    }

    /// Verifies and decodes a payload, as [`load`](Self::load) does. Reads no constants and does
    /// not use MLX.
    ///
    /// # Errors
    /// [`Program`](Status::Program) and [`Unsupported`](Status::Unsupported).
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
    /// [`Backend`](Status::Backend).
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
    /// - [`InvalidArgument`](Status::InvalidArgument), [`Shape`](Status::Shape) and
    ///   [`Dtype`](Status::Dtype) for inputs that do not fit.
    /// - Those of the cache for positions that it refuses, and [`NoCache`](Status::NoCache) if the
    ///   program needs a cache and has none.
    /// - [`Backend`](Status::Backend), and those of `host`.
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
        bind_inputs(&self.inputs, inputs, &mut frame)?;
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

/// Improves a program for a target. Returns the layout of each constant. Also returns whether the last row of logits
/// must be selected from all rows, because the program does not compute logits row by row.
fn prepare(
    graph: &mut Graph,
    target: Target,
    scalars: &HashMap<Value, f32>,
) -> Result<(Vec<Layout>, bool)> {
    if !target.last_token_only {
        return Ok((passes::run(graph, target, scalars)?, false));
    }
    let before = graph.clone();
    let error = match passes::run(graph, target, scalars) {
        Ok(layouts) => return Ok((layouts, false)),
        Err(error) => error,
    };
    *graph = before;
    if error.status() != Status::Unsupported || passes::logits_output(graph).is_err() {
        return Err(error);
    }
    debug!(target: TARGET, why = %error, "the last row of the logits is selected from all rows");
    let target = Target { last_token_only: false, ..target };
    Ok((passes::run(graph, target, scalars)?, true))
}

/// Returns the cache under `key`, if the program can use it. Applies the passes that depend on the cache.
fn bind(graph: &mut Graph, key: &str) -> Result<(SharedCache, ProgramCache)> {
    let entry = CacheRegistry::global().get(key)?;
    if entry.backend_id != MLX_BACKEND {
        fail!(
            Kind,
            "the program is for backend `{MLX_BACKEND}`, the cache `{key}` for `{}`; make the session \
             for the program's backend",
            entry.backend_id
        );
    }
    let layers: BTreeSet<usize> = graph
        .main
        .instructions
        .iter()
        .filter_map(|instruction| match instruction.op {
            Op::UpdateAndAttend { layer, .. } => Some(layer),
            _ => None,
        })
        .collect();
    let n_layers = entry.cache.n_layers();
    if !layers.iter().copied().eq(0..n_layers) {
        fail!(
            Shape,
            "the program attends in {} layers, the cache `{key}` has {n_layers}",
            layers.len()
        );
    }
    check_recurrent(graph, key, &entry.cache)?;
    let bound = entry.cache.program()?;
    for limit in by_capacity::choose(graph, entry.cache.capacity()) {
        debug!(target: TARGET, limit, "the capacity exceeds a limit of the program");
        entry.cache.lock()?.pass_limit(limit)?;
    }
    Ok((entry.cache, bound))
}

/// Returns the calls of recurrent layers.
fn recurrent_calls(graph: &Graph) -> impl Iterator<Item = &RecurrentCall> {
    graph.main.instructions.iter().filter_map(|instruction| match &instruction.op {
        Op::UpdateRecurrent(call) => Some(&**call),
        _ => None,
    })
}

/// Checks that the program calls each recurrent layer of the cache, with its sizes.
fn check_recurrent(graph: &Graph, key: &str, cache: &SharedCache) -> Result<()> {
    let layers: BTreeSet<usize> = recurrent_calls(graph).map(|call| call.layer).collect();
    let n_layers = cache.n_recurrent_layers();
    if !layers.iter().copied().eq(0..n_layers) {
        fail!(
            Shape,
            "the program calls {} recurrent layers, the cache `{key}` has {n_layers}",
            layers.len()
        );
    }
    if n_layers == 0 {
        return Ok(());
    }
    let guard = cache.lock()?;
    let found = &guard.config().recurrent_layers;
    for call in recurrent_calls(graph) {
        match found.get(call.layer) {
            Some(layer) if *layer == call.config => {}
            Some(layer) => fail!(
                Shape,
                "recurrent layer {} is {} in the program, and {layer} in the cache `{key}`",
                call.layer,
                call.config
            ),
            None => {}
        }
    }
    Ok(())
}

fn tensor_inputs(inputs: &[InputSpec]) -> usize {
    inputs.iter().filter(|input| matches!(input, InputSpec::Tensor { .. })).count()
}

/// Loads the constants that the program uses, and runs the init chain.
fn load_constants(
    mlx: &Mlx,
    graph: &mut Graph,
    layouts: &[Layout],
    source: &mut dyn ConstantSource,
) -> Result<Vec<Option<Array>>> {
    let targets: BTreeSet<Value> = graph.init_targets.iter().copied().collect();
    let used_by_init: BTreeSet<Value> = graph.init.uses().collect();
    let mut constants = graph
        .constants
        .iter()
        .enumerate()
        .map(|(index, constant)| {
            // A constant that the init chain replaces is stored as a scalar placeholder.
            let value = Value(index as u32);
            let replaced = targets.contains(&value) && !used_by_init.contains(&value);
            match layouts[index] {
                Layout::Absent => Ok(None),
                _ if replaced => Ok(None),
                layout => constants::load(constant, layout, source).map(Some),
            }
        })
        .collect::<Result<Vec<_>>>()?;
    if graph.init.instructions.is_empty() && targets.is_empty() {
        return Ok(constants);
    }

    let init = Schedule::new(std::mem::take(&mut graph.init), graph.constants.len() as u32);
    let mut frame = Frame::new(mlx, graph.n_values, graph.n_ints, &constants, StepState::NoCache);
    init.run(&mut frame).map_err(|error| error.at("init chain"))?;
    let (made, _) = frame.finish(&init.chain().outputs)?;
    for (output, target) in made.into_iter().zip(&graph.init_targets) {
        if let Output::Tensor(array) = output {
            array.eval()?;
            constants[target.0 as usize] = Some(array);
        }
    }
    let used: BTreeSet<Value> = graph.main.uses().collect();
    for (index, constant) in constants.iter_mut().enumerate() {
        if !used.contains(&Value(index as u32)) {
            *constant = None;
        }
    }
    Ok(constants)
}

fn bind_inputs(specs: &[InputSpec], inputs: &[Argument], frame: &mut Frame) -> Result<()> {
    if inputs.len() != specs.len() {
        fail!(InvalidArgument, "expected {} inputs, got {}", specs.len(), inputs.len());
    }
    for (index, (spec, input)) in specs.iter().zip(inputs).enumerate() {
        match spec {
            InputSpec::Int(value) => {
                let Some(number) = input.integer() else {
                    fail!(InvalidArgument, "input {index}: expected an integer, got a tensor");
                };
                match i32::try_from(number) {
                    Ok(number) => frame.set_int(*value, number),
                    Err(_) => fail!(
                        InvalidArgument,
                        "input {index}: expected a number within 32 bits, got {number}"
                    ),
                }
            }
            InputSpec::Tensor { value, name, shape, scalar_type } => {
                let array = tensor(input, shape, *scalar_type)
                    .map_err(|error| error.at(format_args!("input {index}, {name}")))?;
                if let Some(numbers) = integers(array.dtype(), input.bytes()) {
                    frame.set_host_ints(*value, numbers);
                }
                frame.set(*value, array);
            }
        }
    }
    Ok(())
}

/// Returns an input as an array. Copies its elements.
fn tensor(input: &Argument, shape: &[Dim], scalar_type: i8) -> Result<Array> {
    let dtype = dtype_of(scalar_type)?;
    if !input.is_tensor() {
        fail!(InvalidArgument, "expected a tensor, got an integer");
    }
    if input.scalar_type() != scalar_type {
        let found = dtype_of(input.scalar_type()).map_or("another dtype", dtype::name);
        fail!(Dtype, "expected {}, got {found}", dtype::name(dtype));
    }
    check_shape(input.shape(), shape)?;
    let n: usize = input.shape().iter().map(|&dim| dim as usize).product();
    if n * dtype::item_size(dtype) != input.bytes().len() {
        fail!(Internal, "got {} bytes for shape {:?}", input.bytes().len(), input.shape());
    }
    // SAFETY: the number of bytes matches shape and dtype.
    let array = unsafe { mlx::host_array(input.bytes(), input.shape(), dtype) }?;
    match dtype {
        // Ids and positions are read only once.
        Dtype::Int32 | Dtype::Int64 => Ok(array),
        _ => mlx::on_device(&array),
    }
}

fn check_shape(found: &[i32], expected: &[Dim]) -> Result<()> {
    let fits = |(&size, dim): (&i32, &Dim)| match *dim {
        Dim::Static(expected) => size == expected,
        Dim::UpTo(limit) => size >= 1 && limit.is_none_or(|limit| size <= limit),
    };
    if found.len() == expected.len() && found.iter().zip(expected).all(fits) {
        return Ok(());
    }
    let expected: Vec<String> = expected
        .iter()
        .map(|dim| match dim {
            Dim::Static(size) => size.to_string(),
            Dim::UpTo(Some(limit)) => format!("1 to {limit}"),
            Dim::UpTo(None) => String::from("1 or more"),
        })
        .collect();
    Err(Error::new(
        Status::Shape,
        format!("expected shape [{}], got {found:?}", expected.join(", ")),
    ))
}

/// Returns the elements of an integer tensor, or `None` for other dtypes.
fn integers(dtype: Dtype, bytes: &[u8]) -> Option<HostInts> {
    let chunks = |size: usize| bytes.chunks_exact(size);
    match dtype {
        Dtype::Int64 => Some(
            chunks(8)
                .map(|chunk| i64::from_ne_bytes(chunk.try_into().unwrap_or_default()))
                .collect(),
        ),
        Dtype::Int32 => Some(
            chunks(4)
                .map(|chunk| i64::from(i32::from_ne_bytes(chunk.try_into().unwrap_or_default())))
                .collect(),
        ),
        _ => None,
    }
}
