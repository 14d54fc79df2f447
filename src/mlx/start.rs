//! Starting MLX: its release, device, stream and libraries.

use std::ffi::CStr;

use mlx_rs::{memory, Device, DeviceType, Stream};

use super::calls::{check, on_error};
use crate::error::{fail, Error, Result, Status};
use crate::kernel_cache::{self, KernelCache};

/// The MLX release for which this library is built.
pub const MLX_VERSION: &str = env!("ETKV_MLX_VERSION");

/// The number of operations in each graph that MLX sends to an NVIDIA GPU.
const OPERATIONS_OF_A_GRAPH: &str = "50";

/// The objects that are created when MLX starts.
pub struct Runtime {
    pub stream: Stream,
    pub on_gpu: bool,
    /// The cache of the kernels that MLX compiles for an NVIDIA GPU, if there is one.
    pub kernels: Option<KernelCache>,
}

// SAFETY: the stream belongs to no thread, and is used only under the lock of MLX, by one thread at a time.
unsafe impl Send for Runtime {}
// SAFETY: as above.
unsafe impl Sync for Runtime {}

/// Returns the version of MLX in this process.
pub fn version() -> String {
    // SAFETY: the string is created, read and freed here.
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

/// Loads the library that multiplies matrices for MLX on the CPU. Returns its name: OpenBLAS with its configuration,
/// `MLX's own`, or Apple's `Accelerate`.
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

/// Starts MLX.
pub fn start() -> Result<Runtime> {
    let found = version();
    if found != MLX_VERSION {
        fail!(
            Unsupported,
            "this process runs on MLX {found}, but this library is built for {MLX_VERSION}"
        );
    }
    // mlx-c's error handler would end the process. The first call through mlx-rs replaces it by the handler of
    // mlx-rs. The handler of etkv then replaces the handler of mlx-rs, and calls it.
    let device = default_device()?;
    // SAFETY: the handler is a function without state.
    unsafe { mlx_sys::mlx_set_error_handler(Some(on_error), std::ptr::null_mut(), None) };
    let on_gpu = matches!(device.get_type()?, DeviceType::Gpu);
    let architecture = match on_gpu && cfg!(target_os = "linux") {
        true => architecture(&device),
        false => None,
    };
    limit_graphs(architecture.as_deref());
    if on_gpu && cfg!(target_os = "linux") {
        // MLX for CUDA destroys its streams at the end of the process. Streams use objects of the allocator. Objects
        // that are created first are destroyed last, so the allocator is created here.
        memory::active_memory()?;
    }
    let stream = unowned_stream(&device)?;
    // This call makes the linker keep etkv's BLAS library. MLX then finds the library's matrix products before those
    // of its wheel. OpenBLAS itself is loaded by the first product: its threads would occupy the cores of a program
    // that only queries MLX's memory.
    #[cfg(target_os = "linux")]
    // SAFETY: the function does nothing.
    unsafe {
        mlx_sys::etkv_blas_keep();
    }
    // When a process that has used MLX ends, some objects of MLX for CUDA outlive the driver and throw. With this
    // call the process still ends with its own exit status. It is needed even if the stream is on the CPU. SAFETY: it
    // registers a function without state; the stream exists.
    unsafe { mlx_sys::etkv_mlx_end_without_driver() };
    let kernels =
        architecture.and_then(|architecture| kernel_cache::start(&architecture, MLX_VERSION));
    Ok(Runtime { stream, on_gpu, kernels })
}

/// Makes MLX send shorter graphs to NVIDIA GPUs for which it would choose 100 operations. The GPU is idle until the
/// first graph of a step is complete. For other GPUs, MLX chooses 20. A host may set another number. Call this before
/// the first stream is created. It sets an environment variable of the process, once.
fn limit_graphs(architecture: Option<&str>) {
    const VARIABLE: &str = "MLX_MAX_OPS_PER_BUFFER";
    const LONG: [&str; 3] = ["sm_90", "sm_100", "sm_120"];
    let is_long =
        architecture.is_some_and(|name| LONG.contains(&name.trim_end_matches(char::is_alphabetic)));
    if is_long && std::env::var_os(VARIABLE).is_none() {
        std::env::set_var(VARIABLE, OPERATIONS_OF_A_GRAPH);
    }
}

/// Returns MLX's name for the kind of a device, such as `sm_90`.
fn architecture(device: &Device) -> Option<String> {
    let (kind, index) = (device.get_type().ok()?, device.get_index().ok()?);
    // SAFETY: handles are created and freed here; the text lives as long as `info`, and is copied.
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

/// Returns the device that `ETKV_DEVICE` names (`cpu` or `gpu`), or else MLX's default.
fn default_device() -> Result<Device> {
    let device = Device::try_default()?;
    match std::env::var("ETKV_DEVICE").as_deref() {
        Ok("cpu") => Ok(Device::cpu()),
        Ok("gpu") => match device.get_type()? {
            DeviceType::Gpu => Ok(device),
            DeviceType::Cpu => {
                Err(Error::new(Status::Unsupported, "ETKV_DEVICE is gpu, but this MLX has no GPU"))
            }
        },
        Ok(other) => Err(Error::new(
            Status::InvalidArgument,
            format!("ETKV_DEVICE is `{other}`; expected cpu or gpu"),
        )),
        Err(_) => Ok(device),
    }
}

/// Creates a stream that any thread may use, but only one thread at once.
pub fn unowned_stream(device: &Device) -> Result<Stream> {
    let (kind, index) = (device.get_type()?, device.get_index()?);
    // SAFETY: handles are created and freed here; the wrapper holds its own handle of the stream.
    unsafe {
        let raw_device = mlx_sys::mlx_device_new_type(kind.into(), index);
        let raw = mlx_sys::mlx_stream_new_thread_unsafe(raw_device);
        mlx_sys::mlx_device_free(raw_device);
        let made = adopted(device, raw);
        mlx_sys::mlx_stream_free(raw);
        made
    }
}

/// Returns a stream of mlx-c as a stream of mlx-rs. mlx-rs can only wrap the default stream of a device, so `raw` is
/// made the default temporarily.
///
/// # Safety
/// `raw` must be a live stream on `device`.
pub unsafe fn adopted(device: &Device, raw: mlx_sys::mlx_stream) -> Result<Stream> {
    let before = Stream::try_default_on_device(device)?;
    // SAFETY: both are live streams.
    unsafe {
        let made = check(mlx_sys::mlx_set_default_stream(raw))
            .and_then(|()| Ok(Stream::try_default_on_device(device)?));
        check(mlx_sys::mlx_set_default_stream(before.as_ptr()))?;
        made
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_runs_on_the_mlx_that_was_built_for() {
        assert_eq!(version(), MLX_VERSION);
    }
}
