//! The forward that the calls of a program share: a step of the cache, which begins with the first call and
//! is committed after the last.

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

/// The state of a loaded method, which runs one forward at a time on its cache.
pub struct Forward {
    program: String,
    /// The thread that loads the method, and for each call whether it is loaded. ExecuTorch creates the
    /// delegates of a method one after another on one thread.
    loading: Mutex<(ThreadId, Vec<bool>)>,
    state: Mutex<State>,
}

/// The arguments of a call and the dtype of its output, from the host.
pub struct Run<'a> {
    pub inputs: &'a [Argument<'a>],
    /// ExecuTorch's number for the output's dtype.
    pub output_type: i8,
    pub host: &'a mut dyn Host,
    pub parallel: &'a dyn Parallel,
}

/// The state that calls change.
pub struct State {
    pub forwards: Forwards<CpuStore>,
    /// The positions of the call.
    pub positions: Vec<i32>,
    pub attention: attention::Workspace,
    pub recurrent: recurrent::Workspace,
}

thread_local! {
    /// The forward whose step this thread began last. ExecuTorch makes all calls of a forward on one thread.
    static OPEN: RefCell<Weak<Forward>> = const { RefCell::new(Weak::new()) };
}

/// Rolls back the unfinished forward of this thread, after the failure of an operator between two calls.
pub fn abort_forward() {
    // This fails in a thread whose thread-local storage is already destroyed.
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
    /// Returns the forward of the method that this thread loads. Creates it on the cache with this key for
    /// the first call of the method.
    ///
    /// # Errors
    /// [`NoCache`](etkv_core::Status::NoCache) for an unknown key, [`Kind`](etkv_core::Status::Kind) for a
    /// cache of another backend, and [`Shape`](etkv_core::Status::Shape) for a cache that differs in the
    /// number of layers.
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

    /// Adds a call if it belongs to the method that this thread loads. Returns whether it does.
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

    /// Runs `work` for a call on the forward's step. An error rolls the step back.
    ///
    /// # Errors
    /// [`Step`](etkv_core::Status::Step) for a call out of order, and the errors of the positions and of
    /// `work`.
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
                    "an earlier call of the program failed because of a defect; load the program again"
                )
            }
        }
    }
}

impl State {
    /// Reads the positions. Refuses a call out of order.
    fn begin(&mut self, call: &LayerCall, positions: &Argument) -> Result<()> {
        argument::positions(positions, &mut self.positions)?;
        let next = self.forwards.n_made();
        if call.call == 0 {
            // The last forward was not completed: an operator between its calls failed.
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
    /// ExecuTorch's number for the dtype.
    output_type: i8,
    /// The number of elements.
    n: usize,
}

impl OutputMemory {
    /// Returns the elements.
    ///
    /// # Errors
    /// [`Dtype`](etkv_core::Status::Dtype) if they are not in float32.
    ///
    /// # Safety
    /// Nothing else may use the memory during `'a`.
    pub unsafe fn floats<'a>(&self) -> Result<&'a mut [f32]> {
        if self.dtype != Dtype::F32 {
            fail!(Dtype, "output: expected float32, got ExecuTorch's type {}", self.output_type);
        }
        // SAFETY: the host's memory has room for the elements and is aligned, and the caller ensures the rest.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.n) })
    }
}

/// Gets the memory of an output of this shape from the host. `read` lists the inputs that are read while the
/// output is written. They must not overlap the output.
///
/// # Errors
/// The errors of `host`, and [`Shape`](etkv_core::Status::Shape) for memory that does not fit.
pub fn output(
    host: &mut dyn Host,
    shape: &[i32],
    output_type: i8,
    read: &[(&Argument, &str)],
) -> Result<OutputMemory> {
    output_at(host, 0, shape, output_type, read)
}

/// The same as [`output`] for output number `index` of a call with several outputs.
pub fn output_at(
    host: &mut dyn Host,
    index: usize,
    shape: &[i32],
    output_type: i8,
    read: &[(&Argument, &str)],
) -> Result<OutputMemory> {
    let dtype = argument::dtype(output_type).map_err(|error| error.at("output"))?;
    let n: usize = shape.iter().map(|&size| size as usize).product();
    let size = n * dtype.size();
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
    Ok(OutputMemory { start, dtype, output_type, n })
}
