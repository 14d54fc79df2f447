//! Loads a program: decodes it, binds its cache, and loads its constants.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use etkv_core::{CacheRegistry, SharedCache};
use etkv_delegate::{LoadOptions, LogitsRows, Passes};
use mlx_rs::Array;
use tracing::{debug, info};

use super::{bound, LoadedProgram, Program};
use crate::error::{fail, Result, Status};
use crate::frontend::decode::decode;
use crate::frontend::payload;
use crate::ir::{Graph, InputSpec, Op, RecurrentCall, Value};
use crate::ops::frame::{Frame, Output, StepState};
use crate::passes::{self, by_capacity, Layout, Target};
use crate::runtime::buffers::Buffers;
use crate::runtime::constants::{self, ConstantSource};
use crate::runtime::schedule::Schedule;
use crate::runtime::step_executor::StepCompiler;
use crate::runtime::stream::ProgramStream;
use crate::TARGET;
use etkv::mlx::{self, Mlx};
use etkv::{ProgramCache, MLX_BACKEND};

impl Program {
    pub(super) fn load_now(
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
            // This pass runs after the executor is created, because executors choose the rows to copy
            // themselves, and do not support the instruction that the pass inserts.
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
        if let Some(layer) = found.get(call.layer).filter(|layer| **layer != call.config) {
            fail!(
                Shape,
                "recurrent layer {} is {} in the program, and {layer} in the cache `{key}`",
                call.layer,
                call.config
            );
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
