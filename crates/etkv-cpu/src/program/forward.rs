//! The forward that the calls of a program share: a step that is open on the cache from the first call to the
//! last.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::ThreadId;

use etkv_core::{fail, CacheRegistry, Entry, Forwards, Result};
use etkv_delegate::{Argument, Host};
use tracing::info;

use super::argument;
use super::payload::LayerCall;
use super::TARGET;
use crate::attention;
use crate::backend::CPU_BACKEND;
use crate::parallel::Parallel;
use crate::recurrent;
use crate::store::CpuStore;
use crate::tensor::Dtype;

/// The forwards of a loaded method on its cache, one at a time.
pub struct Forward {
    program: String,
    /// The thread that loads the method, and whether each of its calls is loaded: ExecuTorch makes the
    /// delegates of a method one after another.
    loading: Mutex<(ThreadId, Vec<bool>)>,
    state: Mutex<State>,
}

/// The arguments of a call and its output's dtype, from the host.
pub struct Run<'a> {
    pub inputs: &'a [Argument<'a>],
    /// The output's dtype, as ExecuTorch numbers it.
    pub output_type: i8,
    pub host: &'a mut dyn Host,
    pub parallel: &'a dyn Parallel,
}

/// The part that changes from call to call.
pub struct State {
    pub forwards: Forwards<CpuStore>,
    /// The positions of the call.
    pub positions: Vec<i32>,
    pub attention: attention::Workspace,
    pub recurrent: recurrent::Workspace,
}

thread_local! {
    /// The forward whose step this thread opened last: ExecuTorch makes all calls of a forward on one thread.
    static OPEN: RefCell<Weak<Forward>> = const { RefCell::new(Weak::new()) };
}

/// Rolls back the unfinished forward that this thread began: an operator between two calls failed.
pub fn abort_forward() {
    // A thread that ends may have no thread-local storage left.
    let open = OPEN.try_with(|open| open.take().upgrade()).ok().flatten();
    if let Some(forward) = open {
        if let Ok(mut state) = forward.state() {
            state.forwards.abort();
        }
    }
}

/// Returns the cache with this key.
///
/// # Errors
/// [`NoCache`](etkv_core::Status::NoCache) for an unknown key, and [`Kind`](etkv_core::Status::Kind) for a cache of
/// another backend.
pub fn entry_of(key: &str) -> Result<Entry> {
    let entry = CacheRegistry::global().get(key)?;
    if entry.backend_id != CPU_BACKEND {
        fail!(
            Kind,
            "the program is for backend `{CPU_BACKEND}`, the cache `{key}` for `{}`; make the session for the \
             program's backend",
            entry.backend_id
        );
    }
    Ok(entry)
}

impl Forward {
    /// Returns the forward of the method that this thread loads: the one of its earlier calls, or a new one
    /// on the cache with this key.
    ///
    /// # Errors
    /// [`NoCache`](etkv_core::Status::NoCache) for an unknown key, [`Kind`](etkv_core::Status::Kind)
    /// for a cache of another backend, and [`Shape`](etkv_core::Status::Shape) for a cache with
    /// another number of layers.
    pub fn of_call(call: &LayerCall, key: &str) -> Result<Arc<Self>> {
        let entry = entry_of(key)?;
        let joined =
            entry.cache.bound_programs::<Self>().into_iter().find(|old| old.joins(call, key));
        if let Some(forward) = joined {
            return Ok(forward);
        }
        let n_layers = entry.cache.n_layers();
        if n_layers != call.n_layers {
            fail!(
                Shape,
                "the program attends in {} layers, the cache `{key}` has {n_layers}",
                call.n_layers
            );
        }
        let n_recurrent = entry.cache.n_recurrent_layers();
        if n_recurrent != call.n_recurrent {
            fail!(
                Shape,
                "the program has {} recurrent layers, the cache `{key}` has {n_recurrent}",
                call.n_recurrent
            );
        }
        let mut had = vec![false; call.n_calls];
        had[call.call] = true;
        let forwards = Forwards::new(entry.cache.program()?, call.n_calls);
        let state = State {
            forwards,
            positions: Vec::new(),
            attention: attention::Workspace::default(),
            recurrent: recurrent::Workspace::default(),
        };
        let forward = Arc::new(Self {
            program: call.program.clone(),
            loading: Mutex::new((std::thread::current().id(), had)),
            state: Mutex::new(state),
        });
        entry.cache.bind(&forward);
        Ok(forward)
    }

    /// Adds a call, if it belongs to the method that this thread loads. Returns whether it does.
    fn joins(&self, call: &LayerCall, key: &str) -> bool {
        let mut loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        let (thread, had) = &mut *loading;
        let lacks = self.program == call.program
            && *thread == std::thread::current().id()
            && had.get(call.call) == Some(&false);
        if lacks {
            had[call.call] = true;
            if had.iter().all(|&had| had) {
                info!(target: TARGET, calls = had.len(), key, "a program is loaded");
            }
        }
        lacks
    }

    /// Runs a call: `work` makes it on the forward's step. An error rolls the step back.
    ///
    /// # Errors
    /// [`Step`](etkv_core::Status::Step) for a call out of order; those of the positions and of `work`.
    pub fn run(
        self: &Arc<Self>,
        call: &LayerCall,
        positions: &Argument,
        work: impl FnOnce(&mut State) -> Result<()>,
    ) -> Result<()> {
        let mut state = self.state()?;
        if call.call == 0 {
            OPEN.with(|open| open.replace(Arc::downgrade(self)));
        }
        let begun = state.begin(call, positions);
        let done = begun.and_then(|()| work(&mut state));
        if done.is_err() {
            state.forwards.abort();
        }
        done
    }

    fn state(&self) -> Result<MutexGuard<'_, State>> {
        match self.state.lock() {
            Ok(state) => Ok(state),
            Err(_) => {
                fail!(
                    Internal,
                    "an earlier call of the program failed by a defect; load the program again"
                )
            }
        }
    }
}

impl State {
    /// Reads the positions, and refuses a call out of order.
    fn begin(&mut self, call: &LayerCall, positions: &Argument) -> Result<()> {
        argument::positions(positions, &mut self.positions)?;
        let next = self.forwards.n_made();
        if call.call == 0 {
            // An operator between the calls of the last forward failed.
            self.forwards.abort();
        } else if next != call.call {
            fail!(
                Step,
                "expected call {next} of a forward, got call {}: run whole forwards, one at a time",
                call.call
            );
        }
        Ok(())
    }
}

/// The memory of a call's output.
pub struct OutputMemory {
    pub start: *mut u8,
    pub dtype: Dtype,
}

/// Asks the host for the memory of the output, of this shape. `read` are the inputs that are read while the
/// output is written.
///
/// # Errors
/// Those of `host`, and [`Shape`](etkv_core::Status::Shape) for memory that does not fit.
pub fn output(
    host: &mut dyn Host,
    shape: &[i32],
    output_type: i8,
    read: &[(&Argument, &str)],
) -> Result<OutputMemory> {
    output_at(host, 0, shape, output_type, read)
}

/// [`output`] of a call with several: of the one at `index`.
pub fn output_at(
    host: &mut dyn Host,
    index: usize,
    shape: &[i32],
    output_type: i8,
    read: &[(&Argument, &str)],
) -> Result<OutputMemory> {
    let dtype = argument::dtype(output_type).map_err(|error| error.at("output"))?;
    let size = shape.iter().map(|&size| size as usize).product::<usize>() * dtype.size();
    let out = host.place(index, shape, size)?;
    let start = out.as_mut_ptr();
    if out.len() != size || start.align_offset(dtype.size()) != 0 {
        let found = out.len();
        fail!(Shape, "output: expected {size} aligned bytes for shape {shape:?}, got {found}");
    }
    let end = start.wrapping_add(size).cast_const();
    for (input, name) in read {
        let input = input.bytes().as_ptr_range();
        if start.cast_const() < input.end && input.start < end {
            fail!(Shape, "output: its memory overlaps that of the {name}");
        }
    }
    Ok(OutputMemory { start, dtype })
}
