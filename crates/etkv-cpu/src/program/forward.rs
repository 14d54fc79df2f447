//! The forward that the calls of a program share: a step that is open on the cache from the first
//! call to the last.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use etkv_core::{fail, CacheRegistry, Entry, Result};
use etkv_delegate::{Argument, Host};
use tracing::info;

use super::argument;
use super::payload::Attend;
use super::TARGET;
use crate::attend::attend_into;
use crate::attention::Workspace;
use crate::backend::{ProgramCache, CPU_BACKEND};
use crate::parallel::Parallel;

/// The forwards of a loaded method on its cache, one at a time.
pub struct Forward {
    cache: ProgramCache,
    n_calls: usize,
    state: Mutex<State>,
}

/// What a call gets from its host.
pub struct Run<'a> {
    pub inputs: &'a [Argument<'a>],
    /// ExecuTorch's number of the output's dtype.
    pub output_type: i8,
    pub host: &'a mut dyn Host,
    pub parallel: &'a dyn Parallel,
}

/// What changes from call to call.
#[derive(Default)]
struct State {
    /// The call that comes next. The step is open unless it is 0.
    next: usize,
    /// The positions of the open step.
    positions: Vec<i32>,
    /// Those of the call.
    given: Vec<i32>,
    workspace: Workspace,
}

/// The method that this thread loads: ExecuTorch makes its delegates one after another.
struct Loading {
    program: String,
    key: String,
    /// Whether each of its calls is there.
    had: Vec<bool>,
    forward: Weak<Forward>,
}

thread_local! {
    static LOADING: RefCell<Option<Loading>> = const { RefCell::new(None) };
    /// The forward whose step this thread opened last: ExecuTorch makes the calls of a forward on one
    /// thread.
    static OPEN: RefCell<Weak<Forward>> = const { RefCell::new(Weak::new()) };
}

/// Rolls back the forward that this thread began, if it is not done: an operator between two calls
/// failed.
pub fn abort_forward() {
    // A thread that ends may have no storage left.
    let open = OPEN.try_with(|open| open.take().upgrade()).ok().flatten();
    if let Some(forward) = open {
        if let Ok(mut state) = forward.state() {
            forward.abort(&mut state);
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
    /// Returns the forward of the method that this thread loads: that of its calls so far, or a new
    /// one on the cache with this key.
    ///
    /// # Errors
    /// [`NoCache`](etkv_core::Status::NoCache) for an unknown key, [`Kind`](etkv_core::Status::Kind)
    /// for a cache of another backend, and [`Shape`](etkv_core::Status::Shape) for a cache with
    /// another number of layers.
    pub fn of_call(call: &Attend, key: &str) -> Result<Arc<Self>> {
        LOADING.with(|loading| {
            let loading = &mut *loading.borrow_mut();
            if let Some(method) = loading {
                if let Some(forward) = method.join(call, key) {
                    return Ok(forward);
                }
            }
            let forward = Arc::new(Self::bind(key, call)?);
            let mut had = vec![false; call.n_calls];
            had[call.call] = true;
            *loading = Some(Loading {
                program: call.program.clone(),
                key: key.to_owned(),
                had,
                forward: Arc::downgrade(&forward),
            });
            Ok(forward)
        })
    }

    fn bind(key: &str, call: &Attend) -> Result<Self> {
        let entry = entry_of(key)?;
        let n_layers = entry.cache.n_layers();
        if n_layers != call.n_layers {
            fail!(
                Shape,
                "the program attends in {} layers, the cache `{key}` has {n_layers}",
                call.n_layers
            );
        }
        let cache = entry.cache.program()?;
        Ok(Self { cache, n_calls: call.n_calls, state: Mutex::default() })
    }

    /// Carries out a call. An error rolls the step back.
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
        let done = self.attend_now(&mut state, call, run);
        match done {
            Ok(()) => state.next = (call.call + 1) % self.n_calls,
            Err(_) => self.abort(&mut state),
        }
        done
    }

    fn attend_now(&self, state: &mut State, call: &Attend, run: Run) -> Result<()> {
        let Run { inputs, output_type, host, parallel } = run;
        let [q, k, v, positions] = call.inputs.map(|i| &inputs[i]);
        let q = argument::rows(q, "queries")?;
        let (k, v) = (argument::rows(k, "keys")?, argument::rows(v, "values")?);
        argument::positions(positions, &mut state.given)?;
        if call.call == 0 {
            // An operator between the calls of the last forward failed.
            self.abort(state);
        } else if state.next != call.call {
            fail!(
                Step,
                "expected call {} of a forward, got call {}: run whole forwards, one at a time",
                state.next,
                call.call
            );
        } else if state.given != state.positions {
            fail!(Position, "expected the positions of the forward's first layer, got others");
        }
        let mut cache = self.cache.lock()?;
        if call.call == 0 {
            copy(&state.given, &mut state.positions)?;
            cache.begin(&state.positions)?;
            state.next = 1;
        }
        let spec = cache.update_and_fetch(call.layer, &k, &v)?;
        let dtype = argument::dtype(output_type).map_err(|error| error.at("output"))?;
        let &[_, heads, n, _] = q.shape();
        let shape = [1, heads, n, spec.v.head_dim() as i32];
        let size = shape[1..].iter().map(|&size| size as usize).product::<usize>() * dtype.size();
        let out = host.place(0, &shape, size)?;
        let start = out.as_mut_ptr();
        if out.len() != size || start.align_offset(dtype.size()) != 0 {
            fail!(
                Shape,
                "output: expected {size} aligned bytes for shape {shape:?}, got {}",
                out.len()
            );
        }
        // SAFETY: the host's memory has `size` bytes and is aligned, and this call alone borrows it.
        unsafe {
            attend_into(&q, &spec, call.scale, start, dtype, &mut state.workspace, parallel)?
        };
        // A view that is kept would turn the moves of a commit into copies.
        drop(spec);
        if call.call + 1 == self.n_calls {
            cache.commit()?;
        }
        Ok(())
    }

    /// Rolls an open step back.
    fn abort(&self, state: &mut State) {
        if state.next != 0 {
            state.next = 0;
            // A poisoned cache has no step to roll back.
            if let Ok(mut cache) = self.cache.lock() {
                cache.abort();
            }
        }
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

/// Makes `to` the same positions.
fn copy(from: &[i32], to: &mut Vec<i32>) -> Result<()> {
    to.clear();
    argument::reserve(to, from.len())?;
    to.extend_from_slice(from);
    Ok(())
}

impl Drop for Forward {
    fn drop(&mut self) {
        let mut state =
            std::mem::take(self.state.get_mut().unwrap_or_else(PoisonError::into_inner));
        self.abort(&mut state);
    }
}

impl Loading {
    /// Returns the forward if the call is the next of this method.
    fn join(&mut self, call: &Attend, key: &str) -> Option<Arc<Forward>> {
        let same = self.program == call.program
            && self.key == key
            && self.had.get(call.call) == Some(&false);
        // All calls of an earlier load are gone: it failed.
        let forward = self.forward.upgrade().filter(|_| same)?;
        self.had[call.call] = true;
        if self.had.iter().all(|&had| had) {
            info!(target: TARGET, calls = self.had.len(), key, "a program is loaded");
        }
        Some(forward)
    }
}
