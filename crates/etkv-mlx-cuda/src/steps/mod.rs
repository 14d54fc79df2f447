//! Steps of a few tokens as CUDA graphs.
//!
//! Each operation of MLX costs the host 6 to 10 µs on an NVIDIA GPU, more than most take on the device. A
//! program that is a decoder, as a [`Recipe`] knows it, is captured as a CUDA graph instead: its
//! kernels read weights, and read and write keys and values, where MLX's arrays have them.
//!
//! MLX owns the memory, and both use a cache in turns. A captured step begins when what MLX writes to the
//! cache's buffers is complete, and the cache is locked until its end. MLX moves
//! an array when the host reads it and makes others when a pool grows, so a step compares the addresses
//! with those of its graph and captures anew if one has changed.
//!
//! What is not captured runs as before: other programs, steps of more tokens, and formats that are not the
//! program's floats or packed.
//! The results are the same but for the order of sums.

mod heads;
mod packed;
mod plan;
mod pools;
mod recipe;
mod rows;

use std::borrow::Cow;
use std::sync::OnceLock;
use std::time::Instant;

use etkv_core::KvFormat;
use etkv_cuda::{Captured, Copied, Device, Element, StepInputs, MAX_FEW, MAX_GROUPS, MAX_TOKENS};
use mlx_rs::{Array, Dtype};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tracing::{debug, warn};

use self::plan::{Places, Planner};
use self::recipe::Recipe;
use self::rows::{planned_tokens, Groups, Masked};
use etkv::mlx::{self, Mlx};
use etkv::{Error, MlxCache, Result, Status, Step};
use etkv_mlx_program::ir::Graph as Program;
use etkv_mlx_program::{
    dtype_name, item_size, RowsInput, StepCompiler, StepExecutor, StepOutputs, StepSignature,
    StepTokens, Take, Wanted, TARGET,
};

/// Returns the logits that a step of so many tokens copies to the host.
fn copied(wanted: Wanted, tokens: usize) -> Copied {
    match wanted {
        Wanted::LastLogits if tokens > 1 => Copied::Last,
        Wanted::Logits | Wanted::LastLogits => Copied::All,
        Wanted::Chosen => Copied::None,
    }
}

/// What a captured step came to, or why the step is the interpreter's.
type Ran<T> = std::result::Result<T, &'static str>;

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

/// The captured steps of one program.
struct CapturedSteps {
    recipe: Recipe,
    signature: StepSignature,
    planner: Planner,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    graphs: Vec<Graph>,
    /// What could not be captured: long rows of many tokens fit no shared memory.
    failed: Vec<Kind>,
}

impl State {
    /// Returns whether steps of so many tokens could not be captured. What fails without a mask fails
    /// with one.
    fn has_failed(&self, tokens: usize, masked: &Masked) -> bool {
        let planned = planned_tokens(tokens);
        let implies =
            |kind: &Kind| kind.masked.iter().zip(masked).all(|(&one, &other)| other || !one);
        self.failed.iter().any(|kind| kind.tokens == planned && implies(kind))
    }
}

/// What a graph computes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Kind {
    tokens: usize,
    /// Of each group of layers, whether each token sees keys of its own, and not all before it. Steps of many tokens always have such
    /// a list.
    masked: Masked,
    /// Whether tokens have few of these keys in common.
    apart: bool,
    /// The logits that are copied to the host, and whether the greatest of each row is chosen.
    copied: Copied,
    chosen: bool,
}

struct Graph {
    kind: Kind,
    places: Places,
    captured: Captured,
}

/// The device, if this process can capture steps on it.
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
    /// Returns the captured steps of a program, if its constants are what they read and there is a device.
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

    /// Runs a step, or tells why it cannot be captured.
    fn run(
        &self,
        mlx: &mut Mlx,
        constants: &[Option<Array>],
        cache: &mut MlxCache,
        given: StepTokens,
        wanted: Wanted,
        take: &mut Take<'_>,
    ) -> Result<Ran<()>> {
        let positions = given.positions;
        let n = positions.len();
        let Some(ids) = self.planner.ids(given.ids) else {
            return Ok(Err("an id has no row of the table"));
        };
        let mut state = self.state.lock();
        let Some(groups) = Groups::of(&cache.config().layers) else {
            return Ok(Err("the layers have too many policies"));
        };
        if state.has_failed(n, &groups.may_be_masked(false)) {
            return Ok(Err("so many tokens could not be captured"));
        }
        // Codes hide a value that is not finite, and other sequences would read one.
        let is_watched =
            cache.sequences().is_some() || cache.formats().iter().any(|format| !format.is_float());
        let mut step = Step::begin(cache, positions)?;
        let Some(rows) = groups.place(&mut step)? else {
            return declined(step, "the cache has to see the rows");
        };
        let Some(store) = step.store() else {
            return declined(step, "the cache has no buffers of its own");
        };
        let places = match self.planner.places(store, constants, groups) {
            Ok(places) => places,
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
            apart: rows
                .iter()
                .filter_map(|rows| rows.mask.as_ref())
                .any(|mask| self.planner.lie_apart(mask)),
            copied: copied(wanted, n),
            chosen: wanted == Wanted::Chosen || is_watched,
        };
        let Some(graph) = self.graph(&mut state, kind, places) else {
            return declined(step, "this kind could not be captured");
        };
        // SAFETY: the constants and the cache's buffers live as long as the step, and have the shapes that
        // were planned for. The addresses are those of now, and MLX has written what it writes there. This
        // thread has locked the cache.
        let ran = mlx.outside(|| unsafe { graph.captured.run_groups(&inputs, given.rows) });
        let outputs = ran.map_err(|error| Error::new(Status::Backend, error.to_string()))?;
        // The plan may have more tokens than the step.
        let chosen = &outputs.chosen[..n.min(outputs.chosen.len())];
        if is_watched && chosen.iter().any(|&id| id < 0) {
            // A value that is not finite makes the logits of its token so. The interpreter refuses it, or
            // stores it as its codes are.
            return declined(step, "logits are not finite");
        }
        let (hidden, width) = match wanted {
            Wanted::Logits | Wanted::LastLogits => {
                self.planner.side_by_side(&self.recipe, outputs.tapped, n)
            }
            Wanted::Chosen => (Cow::Borrowed(&[][..]), 0),
        };
        let made = match wanted {
            Wanted::Logits | Wanted::LastLogits => {
                let rows = if wanted == Wanted::LastLogits { 1 } else { n };
                let shape = |rows: usize, width: usize| [1, rows as i32, width as i32];
                let vocabulary = self.planner.vocabulary;
                let bytes = rows * vocabulary * item_size(self.planner.dtype);
                let logits = (&outputs.logits[..bytes], shape(rows, vocabulary));
                StepOutputs::Logits(logits, (width > 0).then(|| (&*hidden, shape(n, width))))
            }
            Wanted::Chosen => StepOutputs::Chosen(chosen),
        };
        take(mlx, made)?;
        step.commit(&[])?;
        Ok(Ok(()))
    }

    /// Returns the graph of a kind at these places, captured anew if they are others than before.
    fn graph<'a>(&self, state: &'a mut State, kind: Kind, places: Places) -> Option<&'a mut Graph> {
        if state.has_failed(kind.tokens, &kind.masked) {
            return None;
        }
        let found = state.graphs.iter().position(|graph| graph.kind == kind);
        if let Some(found) = found.filter(|&found| state.graphs[found].places == places) {
            return state.graphs.get_mut(found);
        }
        if let Some(found) = found {
            state.graphs.swap_remove(found);
        }
        let plan = self.planner.plan(&self.recipe, &places, &kind);
        let began = Instant::now();
        let made = device().map(|device| device.capture(&plan));
        let seconds = began.elapsed().as_secs_f32();
        debug!(target: TARGET, ?kind, seconds, "a step is captured");
        match made {
            Some(Ok(captured)) => {
                state.graphs.push(Graph { kind, places, captured });
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

/// Rolls a step back that the interpreter runs instead, and passes on why.
fn declined(step: Step, why: &'static str) -> Result<Ran<()>> {
    step.decline();
    Ok(Err(why))
}

impl StepExecutor for CapturedSteps {
    fn signature(&self) -> &StepSignature {
        &self.signature
    }

    fn suits(&self, cache: &MlxCache, tokens: usize) -> bool {
        let Some(groups) = Groups::of(&cache.config().layers) else {
            return false;
        };
        let masked = groups.may_be_masked(cache.sequences().is_some());
        self.takes(cache, tokens) && !self.state.lock().has_failed(tokens, &masked)
    }

    fn try_step(
        &self,
        mlx: &mut Mlx,
        constants: &[Option<Array>],
        cache: &mut MlxCache,
        given: StepTokens,
        wanted: Wanted,
        take: &mut Take<'_>,
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

/// Returns the type of the elements of a program, if steps can have it.
fn element_of(dtype: Dtype) -> Option<Element> {
    match dtype {
        Dtype::Float16 => Some(Element::F16),
        Dtype::Bfloat16 => Some(Element::Bf16),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
