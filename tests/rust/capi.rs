//! The C interface after a defect: a panic in each call.
//!
//! The test registers a kind that panics, like a kind of another crate, and uses it through the functions that C
//! calls.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::panic::{set_hook, take_hook};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Mutex;

use etkv::{AttendSpec, CellsCache, MlxStore, MLX_BACKEND};
// Links the exported functions, which are called as from C.
use etkv_capi as _;
use etkv_core::{
    AttendCache, Cache, CacheConfig, KvFormat, Memory, Result, SeqCache, SharedCache, TreeCache,
};
use mlx_rs::Array;

/// Handles are opaque in the C interface.
type Handle = *mut c_void;

#[repr(C)]
struct Layer {
    struct_size: usize,
    fields: [i32; 6],
}

#[repr(C)]
struct Config {
    struct_size: usize,
    layers: *const Layer,
    n_layers: usize,
    formats: [*const c_char; 3],
    fields: [i32; 6],
}

extern "C" {
    fn etkv_session_new(
        backend_id: *const c_char,
        kind: *const c_char,
        config: *const Config,
        session: *mut Handle,
        error: *mut Handle,
    ) -> c_int;
    fn etkv_session_cache(session: Handle) -> Handle;
    fn etkv_session_seq(session: Handle, cache: *mut Handle, error: *mut Handle) -> c_int;
    fn etkv_session_tree(session: Handle, cache: *mut Handle, error: *mut Handle) -> c_int;
    fn etkv_session_key(session: Handle) -> *const c_char;
    fn etkv_session_free(session: Handle);
    fn etkv_cache_capacity(cache: Handle) -> i32;
    fn etkv_cache_n_layers(cache: Handle) -> usize;
    fn etkv_cache_kind(cache: Handle) -> *const c_char;
    fn etkv_cache_share(cache: Handle) -> Handle;
    fn etkv_cache_length(cache: Handle, length: *mut i32, error: *mut Handle) -> c_int;
    fn etkv_cache_rewind(cache: Handle, length: i32, error: *mut Handle) -> c_int;
    fn etkv_cache_clear(cache: Handle, release: bool, error: *mut Handle) -> c_int;
    fn etkv_cache_free(cache: Handle);
    fn etkv_seq_cache_rm(c: Handle, seq: i32, begin: i32, end: i32, error: *mut Handle) -> c_int;
    fn etkv_seq_cache_free(cache: Handle);
    fn etkv_tree_cache_len(cache: Handle, seq: i32, n: *mut usize, error: *mut Handle) -> c_int;
    fn etkv_tree_cache_free(cache: Handle);
    fn etkv_registry_get(key: *const c_char, cache: *mut Handle, error: *mut Handle) -> c_int;
    fn etkv_set_log_callback(
        filter: *const c_char,
        callback: Option<unsafe extern "C" fn(i32, *const c_char, *const c_char, Handle)>,
        user: Handle,
        error: *mut Handle,
    ) -> c_int;
    fn etkv_error_message(error: Handle) -> *const c_char;
    fn etkv_error_free(error: Handle);
    fn etkv_live_handles() -> usize;
}

const INTERNAL: c_int = 12;

/// A cache that panics in the calls of the chosen face.
struct BreakingCache {
    inner: CellsCache,
    armed: &'static AtomicBool,
}

impl BreakingCache {
    fn trip(&self, what: &str) {
        assert!(!self.armed.load(Ordering::Relaxed), "tripped in {what}");
    }
}

impl Cache for BreakingCache {
    fn kind(&self) -> &str {
        "breaking"
    }
    fn config(&self) -> &CacheConfig {
        self.inner.config()
    }
    fn capacity(&self) -> i32 {
        self.inner.capacity()
    }
    fn length(&self) -> i32 {
        self.trip("length");
        self.inner.length()
    }
    fn can_extend(&self, n: i32) -> bool {
        self.inner.can_extend(n)
    }
    fn clear(&mut self, release: bool) -> Result<()> {
        self.inner.clear(release)
    }
    fn rewind(&mut self, length: i32) -> Result<()> {
        self.trip("rewind");
        self.inner.rewind(length)
    }
    fn rewindable_to(&self) -> Result<i32> {
        self.inner.rewindable_to()
    }
    fn memory(&self) -> Memory {
        self.inner.memory()
    }
    fn formats(&self) -> [KvFormat; 2] {
        self.inner.formats()
    }
    fn convert(&mut self, k_format: KvFormat, v_format: KvFormat) -> Result<()> {
        self.inner.convert(k_format, v_format)
    }
    fn sequences(&self) -> Option<&dyn SeqCache> {
        self.inner.sequences()
    }
    fn sequences_mut(&mut self) -> Option<&mut dyn SeqCache> {
        self.trip("sequences");
        self.inner.sequences_mut()
    }
    fn trees(&self) -> Option<&dyn TreeCache> {
        self.inner.trees()
    }
    fn trees_mut(&mut self) -> Option<&mut dyn TreeCache> {
        self.trip("trees");
        self.inner.trees_mut()
    }
}

impl AttendCache for BreakingCache {
    type Store = MlxStore;

    fn begin(&mut self, positions: &[i32]) -> Result<()> {
        self.inner.begin(positions)
    }
    fn update_and_fetch(&mut self, layer: usize, k: &Array, v: &Array) -> Result<AttendSpec> {
        self.inner.update_and_fetch(layer, k, v)
    }
    fn eval(&self, outputs: &[&Array]) -> Result<()> {
        self.inner.eval(outputs)
    }
    fn commit(&mut self) -> Result<()> {
        self.inner.commit()
    }
    fn abort(&mut self) {
        self.inner.abort();
    }
}

/// All handles of one cache of this kind.
struct Handles {
    session: Handle,
    cache: Handle,
    sequences: Handle,
    trees: Handle,
}

fn try_session(kind: &CStr) -> (c_int, Handle, Handle) {
    let layer = Layer { struct_size: size_of::<Layer>(), fields: [1, 4, 4, 0, 0, 0] };
    let config = Config {
        struct_size: size_of::<Config>(),
        layers: &layer,
        n_layers: 1,
        formats: [null(); 3],
        fields: [16, 0, 0, 0, 0, 0],
    };
    let backend = CString::new(MLX_BACKEND).unwrap();
    let (mut session, mut error) = (null_mut(), null_mut());
    // SAFETY: structs and strings have the layout of the header.
    let status = unsafe {
        etkv_session_new(backend.as_ptr(), kind.as_ptr(), &config, &mut session, &mut error)
    };
    (status, session, error)
}

impl Handles {
    fn new(kind: &CStr) -> Self {
        let (status, session, _) = try_session(kind);
        assert_eq!(status, 0);
        let mut all = Self { session, cache: null_mut(), sequences: null_mut(), trees: null_mut() };
        // SAFETY: the handles are live, and the pointers valid.
        unsafe {
            all.cache = etkv_session_cache(session);
            assert_eq!(etkv_session_seq(session, &mut all.sequences, null_mut()), 0);
            assert_eq!(etkv_session_tree(session, &mut all.trees, null_mut()), 0);
        }
        all
    }
}

impl Drop for Handles {
    fn drop(&mut self) {
        // SAFETY: each is freed once.
        unsafe {
            etkv_tree_cache_free(self.trees);
            etkv_seq_cache_free(self.sequences);
            etkv_cache_free(self.cache);
            etkv_session_free(self.session);
        }
    }
}

/// Returns the message of an error and frees the error.
fn take(error: Handle) -> String {
    // SAFETY: the error is live, and its message lives as long as the error.
    unsafe {
        let message = CStr::from_ptr(etkv_error_message(error)).to_str().unwrap().to_owned();
        etkv_error_free(error);
        message
    }
}

fn tripped(call: impl FnOnce(*mut Handle) -> c_int, words: &str) {
    let mut error = null_mut();
    assert_eq!(call(&mut error), INTERNAL, "{words}");
    let message = take(error);
    assert!(message.contains(words), "{message}");
}

/// Every call is refused, except calls that free an object or return a fact.
fn broken(all: &Handles) {
    let words = "it can only be freed";
    let (mut number, mut size, mut handle) = (7i32, 7usize, null_mut());
    // SAFETY: the handles are live, and the pointers valid.
    unsafe {
        tripped(|error| etkv_cache_length(all.cache, &mut number, error), words);
        tripped(|error| etkv_cache_rewind(all.cache, 0, error), words);
        tripped(|error| etkv_cache_clear(all.cache, true, error), words);
        tripped(|error| etkv_seq_cache_rm(all.sequences, 0, 0, i32::MAX, error), words);
        tripped(|error| etkv_tree_cache_len(all.trees, 0, &mut size, error), words);
        tripped(|error| etkv_session_seq(all.session, &mut handle, error), words);
        tripped(|error| etkv_session_tree(all.session, &mut handle, error), words);
        assert!(handle.is_null());
        assert_eq!((etkv_cache_capacity(all.cache), etkv_cache_n_layers(all.cache)), (16, 1));
        assert_eq!(CStr::from_ptr(etkv_cache_kind(all.cache)), c"breaking");
        let shared = etkv_cache_share(all.cache);
        tripped(|error| etkv_cache_length(shared, &mut number, error), words);
        etkv_cache_free(shared);
        // A handle obtained by its key is also refused.
        let key = etkv_session_key(all.session);
        assert_eq!(etkv_registry_get(key, &mut handle, null_mut()), 0);
        tripped(|error| etkv_cache_length(handle, &mut number, error), words);
        etkv_cache_free(handle);
    }
    assert_eq!((number, size), (7, 7));
}

/// The log messages so far.
static LOG: Mutex<Vec<String>> = Mutex::new(Vec::new());

unsafe extern "C" fn log(level: i32, target: *const c_char, message: *const c_char, _: Handle) {
    // SAFETY: both strings live during the call.
    let [target, message] = unsafe { [target, message].map(|text| CStr::from_ptr(text)) };
    LOG.lock().unwrap().push(format!("{level} {target:?} {message:?}"));
}

/// Returns the number of log messages with these words.
fn logged(words: &str) -> usize {
    LOG.lock().unwrap().iter().filter(|line| line.contains(words)).count()
}

// A single test, because it counts the handles of the process.
#[test]
fn a_panic_inside_breaks_the_cache_and_nothing_else() {
    static ARMED: AtomicBool = AtomicBool::new(false);
    let registry = etkv::builders();
    registry.register(MLX_BACKEND, "breaking", |config| {
        Ok(SharedCache::new(BreakingCache {
            inner: CellsCache::with_trees(config)?,
            armed: &ARMED,
        }))
    });
    registry.register(MLX_BACKEND, "unmakable", |_| panic!("tripped in the builder"));
    // The panics are expected. Their messages are checked instead of printed.
    let usual = take_hook();
    set_hook(Box::new(move |panic| {
        if !panic.to_string().contains("tripped in") {
            usual(panic);
        }
    }));

    // SAFETY: the callback accepts its arguments.
    let set =
        unsafe { etkv_set_log_callback(c"error".as_ptr(), Some(log), null_mut(), null_mut()) };
    assert_eq!(set, 0);

    let (status, session, error) = try_session(c"unmakable");
    assert!(session.is_null());
    tripped(
        |place| {
            // SAFETY: the pointer is valid.
            unsafe { *place = error };
            status
        },
        "a defect in etkv: tripped in the builder",
    );
    assert_eq!(logged("a defect was caught panic="), 1);
    assert_eq!(logged("tripped in the builder"), 1);

    let other = Handles::new(c"breaking");
    type Call = fn(&Handles, *mut Handle) -> c_int;
    // SAFETY: the handles are live, and the pointers valid.
    let calls: [(&str, Call); 5] = unsafe {
        [
            ("length", |all, error| etkv_cache_length(all.cache, &mut 7, error)),
            ("rewind", |all, error| etkv_cache_rewind(all.cache, 0, error)),
            ("sequences", |all, error| etkv_seq_cache_rm(all.sequences, 0, 0, 1, error)),
            ("sequences", |all, error| etkv_session_seq(all.session, &mut null_mut(), error)),
            ("trees", |all, error| etkv_tree_cache_len(all.trees, 0, &mut 7, error)),
        ]
    };
    for (what, call) in calls {
        let all = Handles::new(c"breaking");
        ARMED.store(true, Ordering::Relaxed);
        tripped(|error| call(&all, error), &format!("a defect in etkv: tripped in {what}"));
        ARMED.store(false, Ordering::Relaxed);
        assert!(logged(&format!("a defect was caught panic=\\\"tripped in {what}")) >= 1);
        broken(&all);
    }

    // Each panic is logged once, and so is each cache that a panic poisons. A later refusal is not a defect.
    assert_eq!(logged("a defect was caught"), 6);
    assert_eq!(logged("etkv::core\" \"the cache is poisoned"), 5);
    assert_eq!(LOG.lock().unwrap().len(), 11);

    let mut length = 7;
    // SAFETY: the handle is live, and the pointer valid.
    assert_eq!(unsafe { etkv_cache_length(other.cache, &mut length, null_mut()) }, 0);
    assert_eq!(length, 0);
    drop(other);
    // SAFETY: the function takes no arguments.
    assert_eq!(unsafe { etkv_live_handles() }, 0);
}
