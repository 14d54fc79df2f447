//! The forward that the calls of a program share: a step that is open on the cache from the first call to the
//! last.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::ThreadId;

use etkv_core::{fail, CacheRegistry, Entry, Forwards, Result};
use etkv_delegate::{Argument, Host};
use tracing::info;

use super::argument;
use super::payload::Attend;
use super::TARGET;
use crate::attend::attend_into;
use crate::attention::Workspace;
use crate::backend::CPU_BACKEND;
use crate::parallel::Parallel;
use crate::store::CpuStore;

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
struct State {
    forwards: Forwards<CpuStore>,
    /// The positions of the call.
    given: Vec<i32>,
    workspace: Workspace,
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
    pub fn of_call(call: &Attend, key: &str) -> Result<Arc<Self>> {
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
        let mut had = vec![false; call.n_calls];
        had[call.call] = true;
        let forwards = Forwards::new(entry.cache.program()?, call.n_calls);
        let state = State { forwards, given: Vec::new(), workspace: Workspace::default() };
        let forward = Arc::new(Self {
            program: call.program.clone(),
            loading: Mutex::new((std::thread::current().id(), had)),
            state: Mutex::new(state),
        });
        entry.cache.bind(&forward);
        Ok(forward)
    }

    /// Adds a call, if it belongs to the method that this thread loads. Returns whether it does.
    fn joins(&self, call: &Attend, key: &str) -> bool {
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

    /// Runs a call. An error rolls the step back.
    ///
    /// # Errors
    /// Those of [`begin`](etkv_core::AttendCache::begin),
    /// [`update_and_fetch`](etkv_core::AttendCache::update_and_fetch) and
    /// [`commit`](etkv_core::AttendCache::commit), those of `host`, and
    /// [`Step`](etkv_core::Status::Step) for a call out of order.
    pub fn attend(self: &Arc<Self>, call: &Attend, run: Run) -> Result<()> {
        let mut state = self.state()?;
        if call.call == 0 {
            OPEN.with(|open| open.replace(Arc::downgrade(self)));
        }
        let done = attend_now(&mut state, call, run);
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

fn attend_now(state: &mut State, call: &Attend, run: Run) -> Result<()> {
    let Run { inputs, output_type, host, parallel } = run;
    let State { forwards, given, workspace } = state;
    let [q, k, v, positions] = call.inputs.map(|i| &inputs[i]);
    let queries = q.bytes().as_ptr_range();
    let q = argument::rows(q, "queries")?;
    let (k, v) = (argument::rows(k, "keys")?, argument::rows(v, "values")?);
    argument::positions(positions, given)?;
    let next = forwards.n_made();
    if call.call == 0 {
        // An operator between the calls of the last forward failed.
        forwards.abort();
    } else if next != call.call {
        fail!(
            Step,
            "expected call {next} of a forward, got call {}: run whole forwards, one at a time",
            call.call
        );
    }
    forwards.call((call.call, call.layer), given, &k, &v, |spec| {
        let dtype = argument::dtype(output_type).map_err(|error| error.at("output"))?;
        let &[_, heads, n, _] = q.shape();
        let shape = [1, heads, n, spec.v.head_dim() as i32];
        let size = shape[1..].iter().map(|&size| size as usize).product::<usize>() * dtype.size();
        let out = host.place(0, &shape, size)?;
        let start = out.as_mut_ptr();
        if out.len() != size || start.align_offset(dtype.size()) != 0 {
            let found = out.len();
            fail!(Shape, "output: expected {size} aligned bytes for shape {shape:?}, got {found}");
        }
        // Attention reads them until its end.
        if start.cast_const() < queries.end && queries.start < start.wrapping_add(size).cast_const()
        {
            fail!(Shape, "output: its memory overlaps that of the queries");
        }
        // SAFETY: the host's memory has `size` bytes and is aligned, and only this call borrows it.
        unsafe { attend_into(&q, spec, call.scale, start, dtype, workspace, parallel) }
    })
}
