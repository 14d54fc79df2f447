//! Kinds that the host adds: callbacks around a kind that exists.

use std::ffi::{c_char, c_void};
use std::ops::Range;
use std::ptr::{null_mut, NonNull};

use etkv_core::{
    fail, AttendCache, Cache, CacheConfig, CacheReport, KvFormat, Memory, ProgramCache, Result,
    SeqCache, SharedCache, Spec, Store, TreeCache,
};

use super::backends;
use super::boundary::{boundary, free, read_struct, text};
use super::cache::etkv_cache;
use super::error::{etkv_error, from_host};
use super::handle;

type State = *mut c_void;
type Inner = *mut etkv_cache;
type Place = *mut *mut etkv_error;

/// The callbacks of a kind that the host adds; see the header.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy)]
pub struct etkv_cache_vtable {
    struct_size: usize,
    create: Option<unsafe extern "C" fn(*mut c_void, Inner, *mut State, Place) -> i32>,
    destroy: Option<unsafe extern "C" fn(State)>,
    can_extend: Option<unsafe extern "C" fn(State, Inner, i32, *mut bool, Place) -> i32>,
    begin_step: Option<unsafe extern "C" fn(State, Inner, *const i32, usize, Place) -> i32>,
    end_step: Option<unsafe extern "C" fn(State, Inner, bool)>,
    clear: Option<unsafe extern "C" fn(State, Inner, bool, Place) -> i32>,
    rewind: Option<unsafe extern "C" fn(State, Inner, i32, Place) -> i32>,
}

/// The pointer that the host passed for its callbacks. Only the host uses it.
#[derive(Clone, Copy)]
struct Context(*mut c_void);

// SAFETY: the host says that its callbacks may be called on any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Adds a kind.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_builder_register(
    backend_id: *const c_char,
    kind: *const c_char,
    base: *const c_char,
    vtable: *const etkv_cache_vtable,
    context: *mut c_void,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe {
        boundary(error, || {
            let registry = backends::builders();
            let backend_id = text(backend_id, "backend_id")?;
            let kind = text(kind, "kind")?.to_owned();
            let base = text(base, "base")?.to_owned();
            let vtable = read_struct(vtable, "vtable")?;
            let context = Context(context);
            if kind.is_empty() {
                fail!(InvalidArgument, "kind is empty");
            }
            let inner = backends::storage_of(backend_id);
            if !registry.knows(inner, &base) {
                fail!(Kind, "base is `{base}`, an unknown cache kind for backend `{inner}`");
            }
            let build = move |config| backends::builders().build(inner, &base, config);
            let name = kind.clone();
            #[cfg(feature = "mlx")]
            if inner == etkv::MLX_BACKEND {
                return registry.register_new(backend_id, &name, move |config| {
                    let cache: Custom<etkv::MlxStore> =
                        Custom::new(&kind, build(config)?, vtable, context)?;
                    Ok(SharedCache::new(cache))
                });
            }
            registry.register_new(backend_id, &name, move |config| {
                let cache: Custom<etkv_cpu::CpuStore> =
                    Custom::new(&kind, build(config)?, vtable, context)?;
                Ok(SharedCache::new(cache))
            })
        })
    }
}

/// A cache of a kind that the host adds. Its inner cache keeps the rows and positions.
struct Custom<S: Store> {
    kind: String,
    config: CacheConfig,
    has_sequences: bool,
    has_trees: bool,
    inner: ProgramCache<S>,
    /// The number of `inner` among the holders of the memory budget.
    holder: Option<u64>,
    /// The host's handle on `inner`.
    handle: Option<NonNull<etkv_cache>>,
    vtable: etkv_cache_vtable,
    state: State,
    /// Whether the host took a `begin_step` and its `end_step` is due.
    open: bool,
}

// SAFETY: the host allows calls of its callbacks, with its state, on any thread; the handle is a
// number.
unsafe impl<S: Store> Send for Custom<S> {}

impl<S: Store> Custom<S> {
    fn new(
        kind: &str,
        inner: SharedCache,
        vtable: etkv_cache_vtable,
        context: Context,
    ) -> Result<Self> {
        let program = inner.program()?;
        let (config, has_sequences, has_trees) = {
            let cache = inner.lock()?;
            (cache.config().clone(), cache.sequences().is_some(), cache.trees().is_some())
        };
        let holder = inner.holder();
        let handle = NonNull::new(handle::give(etkv_cache { cache: inner }));
        let mut made = Self {
            kind: kind.to_owned(),
            config,
            has_sequences,
            has_trees,
            inner: program,
            holder,
            handle,
            // Set once there is a state to destroy.
            vtable: etkv_cache_vtable { destroy: None, ..vtable },
            state: null_mut(),
            open: false,
        };
        if let Some(create) = vtable.create {
            let (handle, mut state) = (made.handle(), null_mut());
            // SAFETY: the host says that it can be called so.
            call("create", |error| unsafe { create(context.0, handle, &mut state, error) })?;
            made.state = state;
        }
        made.vtable.destroy = vtable.destroy;
        Ok(made)
    }

    fn handle(&self) -> Inner {
        self.handle.map_or(null_mut(), NonNull::as_ptr)
    }

    fn refuse_in_step(&self, what: &str) -> Result<()> {
        if self.open {
            fail!(Step, "cannot {what} in the middle of a step");
        }
        Ok(())
    }

    fn end(&mut self, committed: bool) {
        if std::mem::take(&mut self.open) {
            if let Some(end_step) = self.vtable.end_step {
                // SAFETY: the host says that it can be called so.
                unsafe { end_step(self.state, self.handle(), committed) };
            }
        }
    }

    /// Asks the inner cache. If it is poisoned, returns the default.
    fn ask<T: Default>(&self, question: impl FnOnce(&dyn AttendCache<Store = S>) -> T) -> T {
        self.inner.lock().map(|cache| question(&*cache)).unwrap_or_default()
    }

    fn with_sequences<T>(&self, work: impl FnOnce(&mut dyn SeqCache) -> Result<T>) -> Result<T> {
        match self.inner.lock()?.sequences_mut() {
            Some(sequences) => work(sequences),
            None => fail!(Kind, "the kind below `{}` has one sequence only", self.kind),
        }
    }

    fn with_trees<T>(&self, work: impl FnOnce(&mut dyn TreeCache) -> Result<T>) -> Result<T> {
        match self.inner.lock()?.trees_mut() {
            Some(trees) => work(trees),
            None => fail!(Kind, "the kind below `{}` carries no trees", self.kind),
        }
    }
}

/// Calls a callback of the host, and returns its error, if any.
fn call(what: &str, callback: impl FnOnce(Place) -> i32) -> Result<()> {
    let mut error = null_mut();
    let status = callback(&mut error);
    from_host(status, error, what)
}

impl<S: Store> Drop for Custom<S> {
    fn drop(&mut self) {
        self.end(false);
        if let Some(destroy) = self.vtable.destroy {
            // SAFETY: the host says that it can be called so, and this is the only call.
            unsafe { destroy(self.state) };
        }
        free(self.handle());
    }
}

impl<S: Store> Cache for Custom<S> {
    fn kind(&self) -> &str {
        &self.kind
    }

    fn config(&self) -> &CacheConfig {
        &self.config
    }

    fn capacity(&self) -> i32 {
        self.ask(|cache| cache.capacity())
    }

    fn length(&self) -> i32 {
        self.ask(|cache| cache.length())
    }

    fn next_position(&self) -> Result<i32> {
        self.inner.lock()?.next_position()
    }

    fn can_extend(&self, n: i32) -> bool {
        let Some(can_extend) = self.vtable.can_extend else {
            return self.ask(|cache| cache.can_extend(n));
        };
        let mut fits = false;
        // SAFETY: the host says that it can be called so.
        let asked = call("can_extend", |error| unsafe {
            can_extend(self.state, self.handle(), n, &mut fits, error)
        });
        asked.is_ok() && fits
    }

    fn clear(&mut self, release: bool) -> Result<()> {
        self.refuse_in_step("clear the cache")?;
        match self.vtable.clear {
            Some(clear) => call("clear", |error| {
                // SAFETY: the host says that it can be called so.
                unsafe { clear(self.state, self.handle(), release, error) }
            }),
            None => self.inner.lock()?.clear(release),
        }
    }

    fn rewind(&mut self, length: i32) -> Result<()> {
        self.refuse_in_step("rewind the cache")?;
        match self.vtable.rewind {
            Some(rewind) => call("rewind", |error| {
                // SAFETY: the host says that it can be called so.
                unsafe { rewind(self.state, self.handle(), length, error) }
            }),
            None => self.inner.lock()?.rewind(length),
        }
    }

    fn rewindable_to(&self) -> Result<i32> {
        self.inner.lock()?.rewindable_to()
    }

    fn memory(&self) -> Memory {
        self.ask(|cache| cache.memory())
    }

    fn report(&self) -> CacheReport {
        let found = self.inner.lock().map(|cache| cache.report());
        let mut report = match found {
            Ok(report) => report,
            Err(error) => {
                let mut report = CacheReport::of(self);
                report.poisoned = Some(error.to_string());
                report
            }
        };
        report.kind = self.kind.clone();
        report
    }

    fn holder(&self) -> Option<u64> {
        self.holder
    }

    fn formats(&self) -> [KvFormat; 2] {
        self.ask(|cache| cache.formats())
    }

    fn convert(&mut self, k_format: KvFormat, v_format: KvFormat) -> Result<()> {
        self.inner.lock()?.convert(k_format, v_format)
    }

    fn sequences(&self) -> Option<&dyn SeqCache> {
        self.has_sequences.then_some(self as &dyn SeqCache)
    }

    fn sequences_mut(&mut self) -> Option<&mut dyn SeqCache> {
        self.has_sequences.then_some(self as &mut dyn SeqCache)
    }

    fn trees(&self) -> Option<&dyn TreeCache> {
        self.has_trees.then_some(self as &dyn TreeCache)
    }

    fn trees_mut(&mut self) -> Option<&mut dyn TreeCache> {
        self.has_trees.then_some(self as &mut dyn TreeCache)
    }
}

impl<S: Store> SeqCache for Custom<S> {
    fn begin_step(&mut self, sequences: &[i32]) -> Result<()> {
        self.with_sequences(|cache| cache.begin_step(sequences))
    }

    fn begin_step_shared(&mut self, sequences: &[&[i32]]) -> Result<()> {
        self.with_sequences(|cache| cache.begin_step_shared(sequences))
    }

    fn cancel_step(&mut self) -> Result<()> {
        self.with_sequences(|cache| cache.cancel_step())
    }

    fn seq_cp(&mut self, source: i32, target: i32, positions: Range<i32>) -> Result<()> {
        self.with_sequences(|cache| cache.seq_cp(source, target, positions))
    }

    fn seq_rm(&mut self, sequence: i32, positions: Range<i32>) -> Result<()> {
        self.with_sequences(|cache| cache.seq_rm(sequence, positions))
    }

    fn seq_keep(&mut self, sequence: i32) -> Result<()> {
        self.with_sequences(|cache| cache.seq_keep(sequence))
    }

    fn seq_len(&self, sequence: i32) -> Result<i32> {
        self.with_sequences(|cache| cache.seq_len(sequence))
    }

    fn seq_next(&self, sequence: i32) -> Result<i32> {
        self.with_sequences(|cache| cache.seq_next(sequence))
    }

    fn awaits_text(&self) -> bool {
        self.with_sequences(|cache| Ok(cache.awaits_text())).unwrap_or(false)
    }

    fn seq_positions(&self, sequence: i32) -> Result<Vec<Range<i32>>> {
        self.with_sequences(|cache| cache.seq_positions(sequence))
    }

    fn seq_rewindable_to(&self, sequence: i32) -> Result<i32> {
        self.with_sequences(|cache| cache.seq_rewindable_to(sequence))
    }

    fn live_sequences(&self) -> Vec<i32> {
        self.with_sequences(|cache| Ok(cache.live_sequences())).unwrap_or_default()
    }

    fn compact(&mut self) -> Result<()> {
        self.with_sequences(|cache| cache.compact())
    }
}

impl<S: Store> TreeCache for Custom<S> {
    fn propose(&mut self, sequence: i32, parents: &[i32]) -> Result<()> {
        self.with_trees(|cache| cache.propose(sequence, parents))
    }

    fn commit_tree(&mut self, sequence: i32, accepted: &[i32]) -> Result<()> {
        self.with_trees(|cache| cache.commit_tree(sequence, accepted))
    }

    fn tree_len(&self, sequence: i32) -> Result<usize> {
        self.with_trees(|cache| cache.tree_len(sequence))
    }
}

impl<S: Store> AttendCache for Custom<S> {
    type Store = S;

    fn begin(&mut self, positions: &[i32]) -> Result<()> {
        if self.open {
            fail!(Step, "a step is open on this cache");
        }
        if let Some(begin_step) = self.vtable.begin_step {
            // SAFETY: the host says that it can be called so.
            call("begin_step", |error| unsafe {
                begin_step(self.state, self.handle(), positions.as_ptr(), positions.len(), error)
            })?;
        }
        self.open = true;
        let begun = self.inner.lock().and_then(|mut cache| cache.begin(positions));
        if begun.is_err() {
            self.end(false);
        }
        begun
    }

    fn update_and_fetch(&mut self, layer: usize, k: &S::Tensor, v: &S::Tensor) -> Result<Spec<S>> {
        self.inner.lock()?.update_and_fetch(layer, k, v)
    }

    fn eval(&self, outputs: &[&S::Tensor]) -> Result<()> {
        self.inner.lock()?.eval(outputs)
    }

    fn schedule(&self, outputs: &[&S::Tensor]) -> Result<()> {
        self.inner.lock()?.schedule(outputs)
    }

    fn commit(&mut self) -> Result<()> {
        self.inner.lock()?.commit()?;
        self.end(true);
        Ok(())
    }

    fn abort(&mut self) {
        if let Ok(mut inner) = self.inner.lock() {
            inner.abort();
        }
        self.end(false);
    }
}
