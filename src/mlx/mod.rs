//! All access to MLX: a process-wide lock, the stream that all work runs on, and the few operations that mlx-rs
//! lacks.
//!
//! MLX's graph is not thread-safe, and its ordinary streams belong to the thread that created them. But a host may
//! load on one thread, execute on a second and destroy on a third. So all work here runs on streams that belong to no
//! thread, under one lock. There is one shared stream, and on the CPU one stream for each program. MLX waits when an
//! array of one stream is used on another. [`Mlx`] is the lock. Only one thread holds it at once.
//!
//! The locks cannot deadlock: a thread that holds MLX waits only for the device. [`give_way`] releases MLX while a
//! thread waits for a cache.

pub mod bits;
mod calls;
mod cumulative;
mod host;
mod shares;
mod start;

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::OnceLock;

use mlx_rs::{Device, DeviceType, Stream};
use parking_lot::{Mutex, MutexGuard, ReentrantMutex, ReentrantMutexGuard};

pub use self::calls::{
    arrays, before_writes, call, cast, check, joined, optional_int, slice_axis, synchronize,
    update_axis, wait, Arrays,
};
pub use self::cumulative::{cumprod, cumsum, cumulative};
pub use self::host::{array_of, copy_to, elements, host_array, on_device};
pub use self::shares::shared;
use self::start::{adopted, start, Runtime};
pub use self::start::{blas, unowned_stream, version, MLX_VERSION};
use crate::error::Result;

static LOCK: ReentrantMutex<()> = ReentrantMutex::new(());
static RUNTIME: OnceLock<Result<Runtime>> = OnceLock::new();

thread_local! {
    /// The number of times that this thread holds `LOCK`.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// Whether this thread is inside [`Mlx::run_on`].
    static HAS_STREAM: Cell<bool> = const { Cell::new(false) };
}

/// The number that [`epoch`] returns. It changes only while `LOCK` is held.
static EPOCH: AtomicU64 = AtomicU64::new(0);

/// Whether a host has views of caches, which it may read without this module.
static HAS_VIEWS: AtomicBool = AtomicBool::new(false);

/// Returns a number that changes whenever an existing array may have moved in memory, or been replaced in a cache: when
/// work runs in MLX, when the host reads elements, and with [`hold`]. It does not change when a thread only
/// [enters](enter). For example, a captured step only enters: its CUDA graph reads and writes arrays by their
/// addresses.
#[doc(hidden)]
pub fn epoch(_held: &Mlx) -> u64 {
    // The caller may be in the middle of other work in MLX, and a host with views may do such work at any time.
    if HAS_STREAM.get() || HAS_VIEWS.load(Ordering::Relaxed) {
        begin_epoch();
    }
    EPOCH.load(Ordering::Relaxed)
}

/// Makes each later call of [`epoch`] return another number. Called when a host gets views of caches.
pub(crate) fn end_epochs() {
    HAS_VIEWS.store(true, Ordering::Relaxed);
}

fn begin_epoch() {
    EPOCH.fetch_add(1, Ordering::Relaxed);
}

/// The lock of MLX, held by this thread until dropped. A thread must hold this lock when it drops arrays, even if MLX
/// could not start.
pub struct MlxLock {
    _lock: ReentrantMutexGuard<'static, ()>,
}

/// Waits until no other thread is in MLX, and locks it.
pub fn hold() -> MlxLock {
    let held = lock_mlx();
    begin_epoch();
    held
}

fn lock_mlx() -> MlxLock {
    let lock = LOCK.lock();
    DEPTH.set(DEPTH.get() + 1);
    MlxLock { _lock: lock }
}

impl Drop for MlxLock {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// Runs `wait`, which may block, without the lock of MLX, even if this thread holds it several times. MLX objects of
/// the thread stay valid. Other threads may build and evaluate graphs meanwhile.
#[doc(hidden)]
pub fn give_way<T>(wait: impl FnOnce() -> T) -> T {
    /// Acquires the lock again on drop, even if `wait` panics.
    struct Relock(usize);
    impl Drop for Relock {
        fn drop(&mut self) {
            (0..self.0).for_each(|_| std::mem::forget(LOCK.lock()));
            DEPTH.set(self.0);
        }
    }
    if HAS_STREAM.get() {
        // The work so far may have moved arrays, and another thread now looks at the epoch.
        begin_epoch();
    }
    let depth = DEPTH.replace(0);
    for _ in 0..depth {
        // SAFETY: this thread holds the lock `depth` times, by guards that live until `Relock` has acquired it as
        // many times.
        unsafe { LOCK.force_unlock() };
    }
    let _again = Relock(depth);
    wait()
}

/// Locks `mutex`. Releases MLX while it waits.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.try_lock() {
        Some(guard) => guard,
        None => give_way(|| mutex.lock()),
    }
}

/// Exclusive access of this thread to MLX, until dropped.
pub struct Mlx {
    runtime: &'static Runtime,
    _held: MlxLock,
}

/// Waits until no other thread is in MLX, and enters it. A thread that is inside may enter again.
///
/// # Errors
/// - [`Unsupported`](crate::Status::Unsupported) if the process runs another release of MLX than [`MLX_VERSION`], or
///   if `ETKV_DEVICE` is `gpu` and MLX has no GPU.
/// - [`InvalidArgument`](crate::Status::InvalidArgument) if `ETKV_DEVICE` is neither `cpu` nor `gpu`.
/// - [`Backend`](crate::Status::Backend) if MLX cannot start.
pub fn enter() -> Result<Mlx> {
    let held = lock_mlx();
    Ok(Mlx { runtime: runtime()?, _held: held })
}

impl Mlx {
    /// Runs `work` on the shared stream, or on the stream of the enclosing call.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        self.run_on(&self.runtime.stream, work)
    }

    /// Runs `work` on a stream that belongs to no thread, or on the stream of the enclosing call.
    pub fn run_on<T>(&self, stream: &Stream, work: impl FnOnce() -> T) -> T {
        /// Ends the outermost call on drop, even if `work` panics.
        struct OutermostCall;
        impl Drop for OutermostCall {
            fn drop(&mut self) {
                HAS_STREAM.set(false);
                begin_epoch();
            }
        }
        begin_epoch();
        if HAS_STREAM.replace(true) {
            return work();
        }
        let _outermost = OutermostCall;
        mlx_rs::with_stream(stream, work)
    }

    /// Returns whether the shared stream runs on a GPU.
    pub fn on_gpu(&self) -> bool {
        self.runtime.on_gpu
    }

    /// Publishes the kernels that were compiled since the last call, for later processes.
    pub fn publish_kernels(&self) {
        if let Some(kernels) = &self.runtime.kernels {
            if let Err(error) = kernels.publish() {
                tracing::warn!(%error, "cannot cache kernels for later processes");
            }
        }
    }

    /// Runs `work` without the lock of MLX, so that other threads may enter. If an enclosing call of this thread also
    /// holds the lock, the lock stays held.
    pub fn outside<T>(&mut self, work: impl FnOnce() -> T) -> T {
        if DEPTH.get() > 1 {
            work()
        } else {
            give_way(work)
        }
    }
}

/// Runs `work` exclusively in MLX, on the shared stream. Calls may nest. While `work` waits for a shared
/// cache, other threads may enter MLX.
///
/// # Errors
/// Errors of `work` and of [`enter`].
pub fn run<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    enter()?.run(work)
}

/// Does the same as [`run`], but on the caller's stream. `work` may also use arrays of the shared stream: MLX waits
/// if necessary.
///
/// # Safety
/// `stream` must be a live stream of MLX.
#[doc(hidden)]
pub unsafe fn run_on<T>(
    stream: mlx_sys::mlx_stream,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    run(|| {
        // SAFETY: the caller guarantees that the stream is live.
        let stream = unsafe {
            let device = if is_on_gpu(stream)? { Device::gpu() } else { Device::cpu() };
            adopted(&device, stream)?
        };
        mlx_rs::with_stream(&stream, work)
    })
}

/// Returns whether a stream is on a GPU.
///
/// # Safety
/// `stream` must be a live stream of MLX.
unsafe fn is_on_gpu(stream: mlx_sys::mlx_stream) -> Result<bool> {
    let mut device = mlx_sys::mlx_device { ctx: std::ptr::null_mut() };
    let mut kind = 0;
    // SAFETY: the caller guarantees that the stream is live; the device is freed here.
    unsafe {
        check(mlx_sys::mlx_stream_get_device(&mut device, stream))?;
        let asked = check(mlx_sys::mlx_device_get_type(&mut kind, device));
        mlx_sys::mlx_device_free(device);
        asked?;
    }
    let gpu: mlx_sys::mlx_device_type = DeviceType::Gpu.into();
    Ok(kind == gpu)
}

/// Returns whether the stream of the enclosing [`run`] is the shared stream, and not a stream of the host.
pub fn is_stream_shared() -> Result<bool> {
    let own = Stream::thread_local_or_default();
    // SAFETY: both streams live as long as the objects that own them.
    Ok(unsafe { mlx_sys::mlx_stream_equal(own.as_ptr(), runtime()?.stream.as_ptr()) })
}

/// Returns whether the stream of the enclosing [`run`] is on a GPU.
pub fn is_stream_on_gpu() -> Result<bool> {
    // SAFETY: the stream lives as long as the object that owns it.
    unsafe { is_on_gpu(Stream::thread_local_or_default().as_ptr()) }
}

/// Runs `work` on the shared stream, even if an enclosing call uses another stream. The caller must be inside MLX.
pub fn on_shared<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    mlx_rs::with_stream(&runtime()?.stream, work)
}

fn runtime() -> Result<&'static Runtime> {
    RUNTIME.get_or_init(start).as_ref().map_err(Clone::clone)
}

/// Returns the folder where MLX looks up the kernels of this process, if there is one.
pub fn kernel_folder() -> Option<&'static std::path::Path> {
    if let Ok(runtime) = runtime() {
        return runtime.kernels.as_ref().map(|kernels| kernels.own());
    }
    None
}

/// Returns the folder in which etkv caches what it compiles for this MLX and GPU, if there is one.
#[cfg(target_os = "linux")]
pub fn compiled_folder() -> Option<std::path::PathBuf> {
    Some(kernel_folder()?.parent()?.parent()?.join("compiled"))
}

/// Returns whether the shared stream runs on a GPU. Does not lock once MLX has started.
///
/// # Errors
/// Errors of [`enter`].
pub fn on_gpu() -> Result<bool> {
    match RUNTIME.get() {
        Some(Ok(runtime)) => Ok(runtime.on_gpu),
        _ => Ok(enter()?.on_gpu()),
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs::Array;

    use super::*;

    #[test]
    fn arrays_cross_threads() {
        let make =
            || run(|| Ok(Array::from_slice(&[1.0f32, 2.0], &[2]).add(Array::from_f32(1.0))?));
        let lazy = std::thread::spawn(make).join().unwrap().unwrap();
        let values = std::thread::spawn(move || {
            run(|| {
                lazy.eval()?;
                Ok(lazy.as_slice::<f32>().to_vec())
            })
        });
        assert_eq!(values.join().unwrap().unwrap(), [2.0, 3.0]);
    }

    /// The other thread holds the cache and needs MLX. This thread holds MLX and needs the cache.
    #[test]
    fn a_thread_that_waits_for_a_cache_lets_others_into_mlx() {
        use etkv_core::{CacheConfig, SharedCache};
        use std::sync::mpsc::channel;

        let cache = crate::ContiguousCache::new(CacheConfig::uniform(1, 1, 4, 8)).unwrap();
        let cache = SharedCache::new(cache);
        let (locked, is_locked) = channel();
        let (inside, is_inside) = channel();
        let other = {
            let cache = cache.clone();
            std::thread::spawn(move || {
                let guard = cache.lock().unwrap();
                locked.send(()).unwrap();
                is_inside.recv().unwrap();
                run(|| Ok(())).unwrap();
                drop(guard);
            })
        };
        is_locked.recv().unwrap();
        run(|| {
            run(|| {
                inside.send(()).unwrap();
                assert_eq!(cache.lock()?.length(), 0);
                assert_eq!(DEPTH.get(), 2);
                Ok(())
            })
        })
        .unwrap();
        assert_eq!(DEPTH.get(), 0);
        other.join().unwrap();
    }

    #[test]
    fn an_epoch_ends_when_arrays_may_have_moved() {
        // Other tests do not run in MLX while this thread holds it.
        let mut mlx = enter().unwrap();
        let array = mlx.run(|| Array::from_slice(&[1.0f32, 2.0, 3.0], &[3]));
        let mut last = epoch(&mlx);
        let mut ends = |mlx: &Mlx| std::mem::replace(&mut last, epoch(mlx)) != epoch(mlx);
        drop(enter().unwrap());
        assert!(!ends(&mlx));
        mlx.run(|| mlx.run(|| ()));
        assert!(ends(&mlx));
        drop(hold());
        assert!(ends(&mlx));
        elements::<f32>(&array).unwrap();
        assert!(ends(&mlx));
        // Another thread may read the epoch while this one waits in the middle of its work.
        let around = epoch(&mlx);
        mlx.run(|| {
            let inside = epoch(&mlx);
            give_way(|| assert_ne!(EPOCH.load(Ordering::Relaxed), inside));
        });
        assert_ne!(epoch(&mlx), around);
        assert!(ends(&mlx));
        let before = epoch(&mlx);
        let _around = hold();
        mlx.outside(|| ());
        assert_eq!(epoch(&mlx), before + 1, "only `hold` begins an epoch here");
    }

    #[test]
    fn others_are_in_mlx_while_a_thread_is_outside() {
        let mut mlx = enter().unwrap();
        let is_free = || std::thread::spawn(|| LOCK.try_lock().is_some()).join().unwrap();
        assert!(!is_free());
        mlx.outside(|| std::thread::spawn(|| run(|| Ok(()))).join().unwrap()).unwrap();
        assert!(!is_free());
        // MLX stays locked by an enclosing call.
        let _around = hold();
        assert!(!mlx.outside(is_free));
    }
}
