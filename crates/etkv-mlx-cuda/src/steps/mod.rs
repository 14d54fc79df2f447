//! Steps of a few tokens as CUDA graphs.
//!
//! On an NVIDIA GPU each MLX operation costs the host 6 to 10 µs, which is more than most operations take on
//! the device. A [`Recipe`] recognizes decoders. Their steps are captured as CUDA graphs. The kernels of a
//! graph access MLX's arrays in place: they read weights, and they read and write keys and values.
//!
//! MLX owns the memory, and MLX and the graph take turns in using a cache. A captured step begins when MLX's
//! writes to the cache's buffers are complete, and the cache is locked until the step ends. MLX moves an
//! array when the host reads it, and allocates new arrays when a pool grows. So a step compares the current
//! addresses with those of its graph, and captures the graph again if an address has changed. It asks MLX for
//! the addresses only if MLX has done other work since the last step, or if the last step used another cache.
//!
//! The interpreter runs everything else: other programs, steps of more tokens, and caches whose storage
//! format is neither the program's float dtype nor packed. The results of the interpreter and of captured
//! steps differ only by the order in which sums are computed.

mod heads;
mod packed;
mod plan;
mod pools;
mod recipe;
mod rows;
#[cfg(test)]
mod testing;

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use etkv_core::KvFormat;
use etkv_cuda::{
    CapturedStep, CopiedRows, Device, Element, StepInputs, MAX_FEW, MAX_GROUPS, MAX_TOKENS,
};
use mlx_rs::{Array, Dtype};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tracing::{debug, trace, warn};

use self::plan::{Planner, StepAddresses};
use self::recipe::Recipe;
use self::rows::{planned_tokens, GroupMasks, Groups};
use etkv::mlx::{self, Mlx};
use etkv::{Error, MlxCache, MlxStore, Result, Status, Step};
use etkv_mlx_program::ir::Graph as Program;
use etkv_mlx_program::{
    dtype_name, item_size, RequestedOutputs, RowsInput, StepCompiler, StepExecutor, StepOutputs,
    StepSignature, StepTokens, TakeOutputs, TARGET,
};

/// Returns which rows of logits a step of `tokens` tokens copies to the host.
fn copied(wanted: RequestedOutputs, tokens: usize) -> CopiedRows {
    match wanted {
        RequestedOutputs::LastLogits if tokens > 1 => CopiedRows::Last,
        RequestedOutputs::Logits | RequestedOutputs::LastLogits => CopiedRows::All,
        RequestedOutputs::ArgmaxIds => CopiedRows::None,
    }
}

/// The result of a captured step, or the reason why the interpreter runs the step.
type StepResult<T> = std::result::Result<T, &'static str>;

/// Captures the steps of programs as CUDA graphs.
pub struct CudaSteps;

impl StepCompiler for CudaSteps {
    fn why_not(&self, graph: &Program) -> Option<String> {
        let recipe = match Recipe::with_known_logits(graph) {
            Ok(recipe) => recipe,
            Err(why) => return Some(why.to_string()),
        };
        let table = recipe.table()?;
        let dtype = graph.constants.get(table.0 as usize)?.dtype;
        if element_of(dtype).is_none() {
            let name = dtype_name(dtype);
            return Some(format!("it computes in {name}, not in float16 or bfloat16"));
        }
        None
    }

    fn compile(
        &self,
        mlx: &Mlx,
        graph: &Program,
        constants: &[Option<Array>],
    ) -> Option<Box<dyn StepExecutor>> {
        if !mlx.on_gpu() {
            return None;
        }
        let recipe = match Recipe::with_known_logits(graph) {
            Ok(recipe) => recipe,
            Err(why) => {
                debug!(target: TARGET, %why, "steps are not captured");
                return None;
            }
        };
        Some(Box::new(CapturedSteps::of(recipe, constants)?))
    }
}

struct CapturedSteps {
    recipe: Recipe,
    signature: StepSignature,
    planner: Planner,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    graphs: Vec<Graph>,
    /// Kinds that could not be captured, for example because long rows of many tokens do not fit shared
    /// memory.
    failed: Vec<Kind>,
    last: Option<LastStep>,
}

/// The data of the last step that the next step may reuse.
struct LastStep {
    /// The [id](MlxStore::id) of the cache's store. A cache's layer groups do not change.
    store: u64,
    /// The [epoch](mlx::epoch) in which the addresses were current.
    epoch: u64,
    addresses: Arc<StepAddresses>,
}

impl State {
    /// Returns the layer groups of a cache, or `None` if there are more than a step supports.
    fn groups(&self, cache: &MlxCache) -> Option<Arc<Groups>> {
        let id = cache.store().map(|store| store.id());
        match &self.last {
            Some(last) if Some(last.store) == id => Some(Arc::clone(&last.addresses.groups)),
            _ => Groups::of(&cache.config().layers).map(Arc::new),
        }
    }

    /// Returns whether steps of this number of tokens could not be captured. If the capture of a step without
    /// a mask fails, so does the capture of one with a mask.
    fn has_failed(&self, tokens: usize, masked: &GroupMasks) -> bool {
        let planned = planned_tokens(tokens);
        let implies =
            |kind: &Kind| kind.masked.iter().zip(masked).all(|(&one, &other)| other || !one);
        self.failed.iter().any(|kind| kind.tokens == planned && implies(kind))
    }
}

/// The properties of a captured step.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Kind {
    tokens: usize,
    /// For each layer group, whether the step has a mask. Without a mask, each token sees itself and all keys
    /// before it. Steps of many tokens always have a mask.
    masked: GroupMasks,
    /// Whether attention runs in small blocks of rows: see [`Planner::prefers_small_blocks`].
    small_blocks: bool,
    /// The logits that are copied to the host.
    copied: CopiedRows,
    chosen: bool,
}

struct Graph {
    kind: Kind,
    addresses: Arc<StepAddresses>,
    captured: CapturedStep,
}

/// Returns the device, if this process can capture steps on it.
fn device() -> Option<&'static Device> {
    static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
    DEVICE
        .get_or_init(|| match Device::open(mlx::compiled_folder().as_deref()) {
            Ok(device) => Some(device),
            Err(error) => {
                warn!(target: TARGET, %error, "steps are not captured");
                None
            }
        })
        .as_ref()
}

impl CapturedSteps {
    /// Returns an executor without captured steps. Returns `None` if there is no device, or if the kernels do
    /// not support the layouts of the program's constants.
    fn of(recipe: Recipe, constants: &[Option<Array>]) -> Option<Self> {
        let planner = Planner::of(&recipe, constants)?;
        device()?;
        debug!(target: TARGET, parts = recipe.parts.len(), "steps of a few tokens are captured");
        let rows = recipe.given.iter().map(|own| RowsInput {
            value: own.value,
            width: own.width,
            dtype: own.dtype,
        });
        let signature = StepSignature {
            text: recipe.inputs,
            rows: rows.collect(),
            dtype: planner.dtype,
            logits_at: recipe.logits_at,
            gives_hidden: !recipe.tapped.is_empty(),
        };
        Some(Self { recipe, signature, planner, state: Mutex::default() })
    }

    fn takes(&self, cache: &MlxCache, tokens: usize) -> bool {
        let most = if self.planner.takes_many { MAX_TOKENS } else { MAX_FEW };
        (1..=most).contains(&tokens)
            && (tokens == 1 || !self.recipe.last_row_only)
            && self.can_write_to(cache)
    }

    fn can_write_to(&self, cache: &MlxCache) -> bool {
        cache.store().is_some() && self.planner.can_store(cache.formats())
    }

    /// Runs a step, or returns the reason why it cannot be captured.
    fn run(
        &self,
        mlx: &mut Mlx,
        constants: &[Option<Array>],
        cache: &mut MlxCache,
        given: StepTokens,
        wanted: RequestedOutputs,
        take: &mut TakeOutputs<'_>,
    ) -> Result<StepResult<()>> {
        let positions = given.positions;
        let n = positions.len();
        let Some(ids) = self.planner.ids(given.ids) else {
            return Ok(Err("an id has no row of the table"));
        };
        let mut state = self.state.lock();
        let Some(groups) = state.groups(cache) else {
            return Ok(Err("the layers have too many different policies"));
        };
        if state.has_failed(n, &groups.may_be_masked(false)) {
            return Ok(Err("steps of this many tokens could not be captured"));
        }
        // In steps of shared caches and of caches with packed rows, all logits must be finite. Packed codes
        // hide values that are not finite. In a shared cache, other sequences would read such values.
        let is_watched =
            cache.sequences().is_some() || cache.formats().iter().any(|format| !format.is_float());
        let mut step = Step::begin(cache, positions)?;
        let Some(rows) = groups.place(&mut step)? else {
            return declined(step, "the cache must see the rows");
        };
        let Some(store) = step.store() else {
            return declined(step, "the cache has no buffers of its own");
        };
        let addresses = match self.addresses(&mut state, mlx, store, constants, groups) {
            Ok(addresses) => addresses,
            Err(why) => return declined(step, why),
        };
        let inputs: SmallVec<[StepInputs; MAX_GROUPS]> = rows
            .iter()
            .map(|rows| StepInputs {
                ids: &ids,
                positions,
                slots: &rows.slots,
                n_keys: rows.n_keys,
                mask: rows.mask.as_ref(),
            })
            .collect();
        let kind = Kind {
            tokens: planned_tokens(n),
            masked: rows.iter().map(|rows| rows.mask.is_some()).collect(),
            small_blocks: rows
                .iter()
                .filter_map(|rows| rows.mask.as_ref())
                .any(|mask| self.planner.prefers_small_blocks(mask)),
            copied: copied(wanted, n),
            chosen: wanted == RequestedOutputs::ArgmaxIds || is_watched,
        };
        let Some(graph) = self.graph(&mut state, kind, addresses) else {
            return declined(step, "this kind could not be captured");
        };
        // SAFETY: the constants and the cache's buffers live as long as the step, and have the planned
        // shapes. The addresses are current, MLX has completed its writes to them, and this thread has locked
        // the cache.
        let ran = mlx.outside(|| unsafe { graph.captured.run_groups(&inputs, given.rows) });
        let outputs = ran.map_err(|error| Error::new(Status::Backend, error.to_string()))?;
        // The plan may have more tokens than the step.
        let chosen = &outputs.chosen[..n.min(outputs.chosen.len())];
        if is_watched && chosen.iter().any(|&id| id < 0) {
            // If a key or value is not finite, neither are the logits of its token. The interpreter runs the
            // step instead: it refuses such a value, or stores its codes.
            return declined(step, "logits are not finite");
        }
        let hidden;
        let made = match wanted {
            RequestedOutputs::Logits | RequestedOutputs::LastLogits => {
                let rows = if wanted == RequestedOutputs::LastLogits { 1 } else { n };
                let shape = |rows: usize, width: usize| [1, rows as i32, width as i32];
                let vocabulary = self.planner.vocabulary;
                let bytes = rows * vocabulary * item_size(self.planner.dtype);
                let logits = (&outputs.logits[..bytes], shape(rows, vocabulary));
                let width;
                (hidden, width) = self.planner.side_by_side(&self.recipe, outputs.tapped, n);
                StepOutputs::Logits(logits, (width > 0).then(|| (&*hidden, shape(n, width))))
            }
            RequestedOutputs::ArgmaxIds => StepOutputs::ArgmaxIds(chosen),
        };
        take(mlx, made)?;
        step.commit(&[])?;
        Ok(Ok(()))
    }

    /// Returns the addresses of the arrays that a step reads or writes: those of the last step if they are
    /// still current.
    fn addresses(
        &self,
        state: &mut State,
        mlx: &Mlx,
        store: &MlxStore,
        constants: &[Option<Array>],
        groups: Arc<Groups>,
    ) -> StepResult<Arc<StepAddresses>> {
        let epoch = mlx::epoch(mlx);
        match &state.last {
            Some(last) if last.store == store.id() && last.epoch == epoch => {
                Ok(Arc::clone(&last.addresses))
            }
            _ => {
                trace!(target: TARGET, epoch, "the addresses of a step are read");
                let addresses = Arc::new(self.planner.addresses(store, constants, groups)?);
                let store = store.id();
                state.last = Some(LastStep { store, epoch, addresses: Arc::clone(&addresses) });
                Ok(addresses)
            }
        }
    }

    /// Returns the graph of a kind at these addresses. Captures it if there is none, or if the addresses have
    /// changed.
    fn graph<'a>(
        &self,
        state: &'a mut State,
        kind: Kind,
        addresses: Arc<StepAddresses>,
    ) -> Option<&'a mut Graph> {
        if state.has_failed(kind.tokens, &kind.masked) {
            return None;
        }
        let found = state.graphs.iter().position(|graph| graph.kind == kind);
        if let Some(found) = found.filter(|&found| state.graphs[found].addresses == addresses) {
            return state.graphs.get_mut(found);
        }
        if let Some(found) = found {
            state.graphs.swap_remove(found);
        }
        let plan = self.planner.plan(&self.recipe, &addresses, &kind);
        let began = Instant::now();
        let made = device().map(|device| device.capture(&plan));
        let seconds = began.elapsed().as_secs_f32();
        debug!(target: TARGET, ?kind, seconds, "a step is captured");
        match made {
            Some(Ok(captured)) => {
                state.graphs.push(Graph { kind, addresses, captured });
                state.graphs.last_mut()
            }
            Some(Err(error)) => {
                warn!(target: TARGET, ?kind, %error, "steps of this kind are not captured");
                state.failed.push(kind);
                None
            }
            None => None,
        }
    }
}

/// Rolls back a step that the interpreter runs instead, and passes the reason on.
fn declined(step: Step, why: &'static str) -> Result<StepResult<()>> {
    step.decline();
    Ok(Err(why))
}

impl StepExecutor for CapturedSteps {
    fn signature(&self) -> &StepSignature {
        &self.signature
    }

    fn suits(&self, cache: &MlxCache, tokens: usize) -> bool {
        let state = self.state.lock();
        let Some(groups) = state.groups(cache) else {
            return false;
        };
        let masked = groups.may_be_masked(cache.sequences().is_some());
        self.takes(cache, tokens) && !state.has_failed(tokens, &masked)
    }

    fn try_step(
        &self,
        mlx: &mut Mlx,
        constants: &[Option<Array>],
        cache: &mut MlxCache,
        given: StepTokens,
        wanted: RequestedOutputs,
        take: &mut TakeOutputs<'_>,
    ) -> Result<bool> {
        let n = given.ids.len();
        let fits = n == given.positions.len() && given.rows.len() == self.recipe.given.len();
        if !fits || !self.takes(cache, n) {
            return Ok(false);
        }
        let ran = self.run(mlx, constants, cache, given, wanted, take)?;
        if let Err(why) = ran {
            debug!(target: TARGET, tokens = n, why, "the interpreter runs a step");
        }
        Ok(ran.is_ok())
    }
}

fn format_of(element: Element) -> KvFormat {
    match element {
        Element::F16 => KvFormat::F16,
        Element::Bf16 => KvFormat::Bf16,
    }
}

/// Returns the element type of a program, if steps support it.
fn element_of(dtype: Dtype) -> Option<Element> {
    match dtype {
        Dtype::Float16 => Some(Element::F16),
        Dtype::Bfloat16 => Some(Element::Bf16),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
