//! All access to MLX: a process-wide lock, the stream that all work runs on, and the few operations
//! that mlx-rs does not offer.
//!
//! MLX's graph is not thread-safe, and its ordinary streams belong to the thread that made them. A
//! host may load on one thread, execute on a second and destroy on a third. So all work here runs
//! on streams that belong to no thread, under one lock: a shared one, and on the CPU one for each
//! program. MLX waits where an array of one stream is used on another. [`Mlx`] is the lock: one
//! thread at a time holds it.
//!
//! Locks cannot wait for each other in a circle, because a thread that holds MLX waits for nothing
//! but the device: [`give_way`] releases MLX while it waits for a cache.

use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_void, CStr};
use std::sync::OnceLock;

use mlx_rs::{Array, Device, DeviceType, Dtype, Stream};
use parking_lot::{Mutex, MutexGuard, ReentrantMutex, ReentrantMutexGuard};

use crate::error::{fail, Error, Result, Status};
#[cfg(feature = "delegate")]
use crate::kernel_cache::{self, KernelCache};

/// The MLX release that this build is made for.
pub const MLX_VERSION: &str = env!("ETKV_MLX_VERSION");

struct Runtime {
    stream: Stream,
    on_gpu: bool,
    /// The kernels that MLX compiles for an NVIDIA GPU, if they are kept.
    #[cfg(feature = "delegate")]
    kernels: Option<KernelCache>,
}

// SAFETY: the stream belongs to no thread, and is used under `LOCK` only, by one thread at a time.
unsafe impl Send for Runtime {}
// SAFETY: as above.
unsafe impl Sync for Runtime {}

static LOCK: ReentrantMutex<()> = ReentrantMutex::new(());
static RUNTIME: OnceLock<Result<Runtime>> = OnceLock::new();

thread_local! {
    /// The number of times that this thread holds `LOCK`.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// The lock of MLX, held by this thread until it is dropped. Dropping arrays needs it, also where
/// MLX could not start.
pub(crate) struct Held {
    _lock: ReentrantMutexGuard<'static, ()>,
}

/// Waits until no other thread is in MLX, and locks it.
pub(crate) fn hold() -> Held {
    let lock = LOCK.lock();
    DEPTH.set(DEPTH.get() + 1);
    Held { _lock: lock }
}

impl Drop for Held {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// Runs `wait`, which may block, without the lock of MLX, however often this thread holds it. What
/// the thread has built in MLX stays. Other threads may build and evaluate meanwhile.
#[doc(hidden)]
pub fn give_way<T>(wait: impl FnOnce() -> T) -> T {
    /// Takes the lock again on drop, also where `wait` panics.
    struct Again(usize);
    impl Drop for Again {
        fn drop(&mut self) {
            (0..self.0).for_each(|_| std::mem::forget(LOCK.lock()));
            DEPTH.set(self.0);
        }
    }
    let depth = DEPTH.replace(0);
    for _ in 0..depth {
        // SAFETY: this thread holds the lock `depth` times, by guards that live until `Again` has
        // taken it as often.
        unsafe { LOCK.force_unlock() };
    }
    let _again = Again(depth);
    wait()
}

/// Locks `mutex`. Releases MLX while it waits.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.try_lock() {
        Some(guard) => guard,
        None => give_way(|| mutex.lock()),
    }
}

/// Access to MLX, which this thread has alone until it is dropped.
pub struct Mlx {
    runtime: &'static Runtime,
    _held: Held,
}

/// Waits until no other thread is in MLX, and enters it. A thread may enter again while it is
/// inside.
///
/// # Errors
/// - [`Unsupported`](Status::Unsupported) if the process runs another release of MLX than
///   [`MLX_VERSION`], or if `ETKV_DEVICE` is `gpu` and MLX has none.
/// - [`InvalidArgument`](Status::InvalidArgument) if `ETKV_DEVICE` is neither `cpu` nor `gpu`.
/// - [`Backend`](Status::Backend) if MLX cannot start.
pub fn enter() -> Result<Mlx> {
    let held = hold();
    Ok(Mlx { runtime: runtime()?, _held: held })
}

impl Mlx {
    /// Runs `work` on the shared stream, or on the stream of the enclosing call.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        self.run_on(&self.runtime.stream, work)
    }

    /// Runs `work` on a stream that belongs to no thread, or on the stream of the enclosing call.
    pub(crate) fn run_on<T>(&self, stream: &Stream, work: impl FnOnce() -> T) -> T {
        thread_local! {
            static HAS_STREAM: Cell<bool> = const { Cell::new(false) };
        }
        /// Ends the outermost call on drop, also where `work` panics.
        struct Outermost;
        impl Drop for Outermost {
            fn drop(&mut self) {
                HAS_STREAM.set(false);
            }
        }
        if HAS_STREAM.replace(true) {
            return work();
        }
        let _outermost = Outermost;
        mlx_rs::with_stream(stream, work)
    }

    /// Returns whether the shared stream runs on a GPU.
    pub fn on_gpu(&self) -> bool {
        self.runtime.on_gpu
    }

    /// Keeps the kernels that were compiled since for later processes.
    #[cfg(feature = "delegate")]
    pub(crate) fn publish_kernels(&self) {
        if let Some(kernels) = &self.runtime.kernels {
            if let Err(error) = kernels.publish() {
                tracing::warn!(%error, "kernels cannot be kept for later processes");
            }
        }
    }

    /// Runs `work` without the lock of MLX, so that other threads may enter. If an enclosing call
    /// of this thread holds the lock too, it stays locked.
    pub fn outside<T>(&mut self, work: impl FnOnce() -> T) -> T {
        if DEPTH.get() > 1 {
            work()
        } else {
            give_way(work)
        }
    }
}

/// Runs `work` alone in MLX, on the shared stream. Calls may nest. While `work` waits for a shared
/// cache, other threads may enter MLX.
///
/// # Errors
/// Those of `work` and of [`enter`].
pub fn run<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    enter()?.run(work)
}

/// Does what [`run`] does on a stream of the caller's. `work` may also use arrays of the shared
/// stream: MLX waits where it must.
///
/// # Safety
/// `stream` is a live stream of MLX.
#[doc(hidden)]
pub unsafe fn run_on<T>(
    stream: mlx_sys::mlx_stream,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    run(|| {
        // SAFETY: the caller says that the stream is live.
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
/// `stream` is a live stream of MLX.
unsafe fn is_on_gpu(stream: mlx_sys::mlx_stream) -> Result<bool> {
    let mut device = mlx_sys::mlx_device { ctx: std::ptr::null_mut() };
    let mut kind = 0;
    // SAFETY: the caller says that the stream is live; the device is freed here.
    unsafe {
        check(mlx_sys::mlx_stream_get_device(&mut device, stream))?;
        let asked = check(mlx_sys::mlx_device_get_type(&mut kind, device));
        mlx_sys::mlx_device_free(device);
        asked?;
    }
    let gpu: mlx_sys::mlx_device_type = DeviceType::Gpu.into();
    Ok(kind == gpu)
}

/// Returns whether the stream of the enclosing [`run`] is on a GPU.
pub(crate) fn is_stream_on_gpu() -> Result<bool> {
    // SAFETY: the stream lives as long as its object.
    unsafe { is_on_gpu(Stream::thread_local_or_default().as_ptr()) }
}

/// Runs `work` on the shared stream, also where an enclosing call has another one. The caller is
/// inside MLX.
#[cfg(feature = "delegate")]
pub(crate) fn on_shared<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    mlx_rs::with_stream(&runtime()?.stream, work)
}

fn runtime() -> Result<&'static Runtime> {
    RUNTIME.get_or_init(start).as_ref().map_err(Clone::clone)
}

/// Returns whether the shared stream runs on a GPU. Takes no lock once MLX has started.
///
/// # Errors
/// Those of [`enter`].
pub fn on_gpu() -> Result<bool> {
    match RUNTIME.get() {
        Some(Ok(runtime)) => Ok(runtime.on_gpu),
        _ => Ok(enter()?.on_gpu()),
    }
}

/// Returns the version of the MLX in this process.
pub fn version() -> String {
    // SAFETY: the string is made, read and freed here.
    unsafe {
        let mut string = mlx_sys::mlx_string_new();
        let text = if mlx_sys::mlx_version(&mut string) == 0 {
            CStr::from_ptr(mlx_sys::mlx_string_data(string)).to_string_lossy().into_owned()
        } else {
            String::from("unknown")
        };
        mlx_sys::mlx_string_free(string);
        text
    }
}

/// Returns the name of the library that multiplies matrices for MLX on the CPU, and loads it:
/// OpenBLAS with its configuration, `MLX's own`, or Apple's `Accelerate`.
pub fn blas() -> &'static str {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: the library's string is static, and ends in a zero byte.
        let name = unsafe { CStr::from_ptr(mlx_sys::etkv_blas_name()) };
        name.to_str().unwrap_or_default()
    }
    #[cfg(not(target_os = "linux"))]
    {
        "Accelerate"
    }
}

fn start() -> Result<Runtime> {
    let found = version();
    if found != MLX_VERSION {
        fail!(
            Unsupported,
            "this process runs on MLX {found}, but this library is built for {MLX_VERSION}"
        );
    }
    // The first call through mlx-rs replaces mlx-c's error handler, which ends the process. Our
    // handler then replaces that of mlx-rs, and calls it.
    let device = default_device()?;
    // SAFETY: the handler is a function without state.
    unsafe { mlx_sys::mlx_set_error_handler(Some(on_error), std::ptr::null_mut(), None) };
    let on_gpu = matches!(device.get_type()?, DeviceType::Gpu);
    let stream = unowned_stream(&device)?;
    // This call makes the linker keep etkv's BLAS library. MLX then finds the matrix products of
    // that library before those of its wheel. OpenBLAS itself is loaded by the first product: its
    // threads would take the cores from a program that only asks for MLX's memory.
    #[cfg(target_os = "linux")]
    // SAFETY: the function does nothing.
    unsafe {
        mlx_sys::etkv_blas_keep();
    }
    // At the end of a process some objects of MLX for CUDA outlive the driver and throw. The
    // process then ends with its own exit status. It is needed also where the stream is on the CPU.
    // SAFETY: it registers a function without state; the stream exists.
    unsafe { mlx_sys::etkv_mlx_end_without_driver() };
    #[cfg(feature = "delegate")]
    let kernels = match on_gpu && cfg!(target_os = "linux") {
        true => architecture(&device)
            .and_then(|architecture| kernel_cache::start(&architecture, MLX_VERSION)),
        false => None,
    };
    Ok(Runtime {
        stream,
        on_gpu,
        #[cfg(feature = "delegate")]
        kernels,
    })
}

/// Returns MLX's name of the kind of a device, such as `sm_90`.
#[cfg(feature = "delegate")]
fn architecture(device: &Device) -> Option<String> {
    let (kind, index) = (device.get_type().ok()?, device.get_index().ok()?);
    // SAFETY: handles are made and freed here; the text lives as long as `info`, and is copied.
    unsafe {
        let raw = mlx_sys::mlx_device_new_type(kind.into(), index);
        let mut info = mlx_sys::mlx_device_info_new();
        let mut text = std::ptr::null();
        let found = mlx_sys::mlx_device_info_get(&mut info, raw) == 0
            && mlx_sys::mlx_device_info_get_string(&mut text, info, c"architecture".as_ptr()) == 0
            && !text.is_null();
        let name = found.then(|| CStr::from_ptr(text).to_string_lossy().into_owned());
        mlx_sys::mlx_device_info_free(info);
        mlx_sys::mlx_device_free(raw);
        name
    }
}

/// Returns the device that `ETKV_DEVICE` names (`cpu` or `gpu`), or else MLX's own choice.
fn default_device() -> Result<Device> {
    let device = Device::try_default()?;
    match std::env::var("ETKV_DEVICE").as_deref() {
        Ok("cpu") => Ok(Device::cpu()),
        Ok("gpu") => match device.get_type()? {
            DeviceType::Gpu => Ok(device),
            DeviceType::Cpu => {
                Err(Error::new(Status::Unsupported, "ETKV_DEVICE is gpu, but this MLX has none"))
            }
        },
        Ok(other) => Err(Error::new(
            Status::InvalidArgument,
            format!("ETKV_DEVICE is `{other}`, it may be cpu or gpu"),
        )),
        Err(_) => Ok(device),
    }
}

/// Makes a stream that any thread may use, one at a time.
pub(crate) fn unowned_stream(device: &Device) -> Result<Stream> {
    let (kind, index) = (device.get_type()?, device.get_index()?);
    // SAFETY: handles are made and freed here; the stream outlives its use because
    // the wrapper holds its own.
    unsafe {
        let raw_device = mlx_sys::mlx_device_new_type(kind.into(), index);
        let raw = mlx_sys::mlx_stream_new_thread_unsafe(raw_device);
        mlx_sys::mlx_device_free(raw_device);
        let made = adopted(device, raw);
        mlx_sys::mlx_stream_free(raw);
        made
    }
}

/// Returns a stream of mlx-c as a stream of mlx-rs. mlx-rs makes streams of a device's default
/// only, so this makes the stream the default for a moment.
///
/// # Safety
/// `raw` is a live stream on `device`.
unsafe fn adopted(device: &Device, raw: mlx_sys::mlx_stream) -> Result<Stream> {
    let before = Stream::try_default_on_device(device)?;
    // SAFETY: both are live streams.
    unsafe {
        let made = check(mlx_sys::mlx_set_default_stream(raw))
            .and_then(|()| Ok(Stream::try_default_on_device(device)?));
        check(mlx_sys::mlx_set_default_stream(before.as_ptr()))?;
        made
    }
}

thread_local! {
    static MESSAGE: RefCell<String> = const { RefCell::new(String::new()) };
}

extern "C" {
    // The handler of mlx-rs. Its wrappers read their messages from it.
    fn default_mlx_error_handler(message: *const c_char, data: *mut c_void);
}

extern "C" fn on_error(message: *const c_char, data: *mut c_void) {
    if !message.is_null() {
        // SAFETY: mlx-c passes a string that ends in a zero byte.
        let text = unsafe { CStr::from_ptr(message) }.to_string_lossy();
        MESSAGE.with_borrow_mut(|kept| {
            kept.clear();
            kept.push_str(&text);
        });
    }
    // SAFETY: the arguments are the handler's own.
    unsafe { default_mlx_error_handler(message, data) };
}

impl From<mlx_rs::error::Exception> for Error {
    fn from(exception: mlx_rs::error::Exception) -> Self {
        error_of(exception.what()).caused_by(exception)
    }
}

#[doc(hidden)]
pub fn check(status: i32) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    Err(MESSAGE.with_borrow(|kept| error_of(kept)))
}

/// Returns MLX's message as an error, without the place in mlx-c's source that mlx-c adds.
fn error_of(message: &str) -> Error {
    let words = message.rsplit_once(" at ").map_or(message, |(words, place)| {
        let is_place = place.rsplit_once(':').is_some_and(|(_, line)| line.parse::<u32>().is_ok());
        if is_place {
            words
        } else {
            message
        }
    });
    Error::new(Status::Backend, words)
}

/// Calls a function of mlx-c that makes an array, on the stream of the enclosing [`run`].
pub(crate) fn call(
    function: impl FnOnce(*mut mlx_sys::mlx_array, mlx_sys::mlx_stream) -> i32,
) -> Result<Array> {
    let stream = Stream::thread_local_or_default();
    // SAFETY: an empty handle, which `function` fills or leaves.
    let mut made = unsafe { mlx_sys::mlx_array_new() };
    let status = function(&mut made, stream.as_ptr());
    // SAFETY: the handle has no other owner.
    let array = unsafe { Array::from_ptr(made) };
    check(status).map(|()| array)
}

/// Returns a view of `array` from `start` to `stop` along `axis`, by `step`.
pub(crate) fn slice_axis(
    array: &Array,
    axis: usize,
    start: i32,
    stop: i32,
    step: i32,
) -> Result<Array> {
    let [from, to, by] = corners(array, axis, start, stop, step);
    let (from, to, by, n) = (from.as_ptr(), to.as_ptr(), by.as_ptr(), from.len());
    // SAFETY: the three lists have `n` elements each, and outlive the call.
    call(|made, stream| unsafe {
        mlx_sys::mlx_slice(made, array.as_ptr(), from, n, to, n, by, n, stream)
    })
}

/// Returns `array` with the rows from `start` to `stop` along `axis` replaced by `update`. It
/// writes in place if only the result of this call holds the buffer when it is evaluated.
pub(crate) fn update_axis(
    array: &Array,
    update: &Array,
    axis: usize,
    start: i32,
    stop: i32,
) -> Result<Array> {
    let [from, to, by] = corners(array, axis, start, stop, 1);
    let (from, to, by, n) = (from.as_ptr(), to.as_ptr(), by.as_ptr(), from.len());
    let (array, update) = (array.as_ptr(), update.as_ptr());
    // SAFETY: the three lists have `n` elements each, and outlive the call.
    call(|made, stream| unsafe {
        mlx_sys::mlx_slice_update(made, array, update, from, n, to, n, by, n, stream)
    })
}

/// Waits until an array is computed. Its computation must have started.
#[cfg(feature = "delegate")]
pub(crate) fn wait(array: &Array) -> Result<()> {
    // SAFETY: the handle is live.
    check(unsafe { mlx_sys::_mlx_array_wait(array.as_ptr()) })
}

/// Returns `array` without the writes to it that have not run. Returns `None` if it is the result
/// of another operation that has not run.
pub(crate) fn before_writes(array: &Array) -> Result<Option<Array>> {
    let mut found = false;
    let before = call(|before, _| {
        // SAFETY: the handles are live; `found` outlives the call.
        unsafe { mlx_sys::etkv_mlx_array_before_writes(before, &mut found, array.as_ptr()) }
    })?;
    Ok(found.then_some(before))
}

type Corner = smallvec::SmallVec<[i32; 8]>;

/// Returns the first and the last corner of a part of `array`, and the steps between them.
fn corners(array: &Array, axis: usize, start: i32, stop: i32, step: i32) -> [Corner; 3] {
    let mut to = Corner::from_slice(array.shape());
    let mut from: Corner = smallvec::smallvec![0; to.len()];
    let mut by: Corner = smallvec::smallvec![1; to.len()];
    if axis < to.len() {
        (from[axis], to[axis], by[axis]) = (start, stop, step);
    }
    [from, to, by]
}

/// Returns the elements of a computed, row-contiguous array, as bytes.
#[cfg(any(test, feature = "delegate"))]
pub(crate) fn bytes(array: &Array) -> Result<&[u8]> {
    let n = array.nbytes();
    if n == 0 {
        return Ok(&[]);
    }
    // SAFETY: the accessor reads nothing; it waits for the buffer and points to it.
    let data = unsafe { mlx_sys::mlx_array_data_uint8(array.as_ptr()) };
    if data.is_null() {
        fail!(Internal, "an array has no data");
    }
    // SAFETY: an evaluated array has `n` bytes there, and keeps them while it is
    // borrowed.
    Ok(unsafe { std::slice::from_raw_parts(data, n) })
}

/// Returns `array` as `dtype`, or the same array if it has that dtype.
pub(crate) fn cast(array: &Array, dtype: Dtype) -> Result<Array> {
    if array.dtype() == dtype {
        Ok(array.clone())
    } else {
        Ok(array.as_dtype(dtype)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_runs_on_the_mlx_that_was_built_for() {
        assert_eq!(version(), MLX_VERSION);
    }

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

    /// The other thread holds the cache and needs MLX. This one holds MLX and needs the cache.
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
    fn others_are_in_mlx_while_a_thread_is_outside() {
        let mut mlx = enter().unwrap();
        let is_free = || std::thread::spawn(|| LOCK.try_lock().is_some()).join().unwrap();
        assert!(!is_free());
        mlx.outside(|| std::thread::spawn(|| run(|| Ok(()))).join().unwrap()).unwrap();
        assert!(!is_free());
        // An enclosing call keeps MLX locked.
        let _around = hold();
        assert!(!mlx.outside(is_free));
    }

    #[test]
    fn errors_of_raw_calls_carry_mlx_words() {
        let error = run(|| {
            let array = Array::from_slice(&[0.0f32; 4], &[4]);
            update_axis(&array, &Array::from_slice(&[0.0f32; 3], &[3]), 0, 0, 2)
        })
        .unwrap_err();
        assert_eq!(error.status(), Status::Backend);
        assert_eq!(error.message(), "[broadcast_shapes] Shapes (3) and (2) cannot be broadcast.");
    }
}
