//! Raw bindings to mlx-c, linked to the MLX that pip installs.
//!
//! Replaces the published crate of the same name and version, which builds MLX from source and only on Apple's systems.
//! `[patch.crates-io]` in the workspace's `Cargo.toml` puts this crate in the place of the published one, and `mlx-rs`
//! itself is not changed.
#![allow(non_upper_case_globals, non_camel_case_types, non_snake_case)]
#![allow(clippy::all)]

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));

/// The half types and their functions. mlx-c declares them only if the C compiler has such types, which is not the
/// case on x86-64.
#[cfg(not(target_arch = "aarch64"))]
mod half {
    use super::mlx_array;

    /// IEEE binary16, as bits.
    #[repr(transparent)]
    #[derive(Debug, Default, Copy, Clone, PartialEq)]
    pub struct float16_t(pub u16);

    /// bfloat16, as bits.
    pub type bfloat16_t = u16;

    extern "C" {
        pub fn mlx_array_item_float16(res: *mut float16_t, arr: mlx_array)
            -> ::std::os::raw::c_int;
        pub fn mlx_array_item_bfloat16(
            res: *mut bfloat16_t,
            arr: mlx_array,
        ) -> ::std::os::raw::c_int;
        pub fn mlx_array_data_float16(arr: mlx_array) -> *const float16_t;
        pub fn mlx_array_data_bfloat16(arr: mlx_array) -> *const bfloat16_t;
    }
}
#[cfg(not(target_arch = "aarch64"))]
pub use half::*;

extern "C" {
    /// Stores the array `written` without its pending writes, and sets whether that was possible. If an operation
    /// other than a write is pending, stores no array.
    pub fn etkv_mlx_array_before_writes(
        before: *mut mlx_array,
        found: *mut bool,
        written: mlx_array,
    ) -> ::std::os::raw::c_int;

    /// Stores an array of `bytes` bytes of host memory that a GPU reads in place. Does nothing for more than 64 KiB,
    /// or while too many of these arrays exist. For MLX's CUDA build only.
    #[cfg(target_os = "linux")]
    pub fn etkv_mlx_array_pinned(
        array: *mut mlx_array,
        made: *mut bool,
        data: *const ::std::os::raw::c_void,
        bytes: usize,
        shape: *const ::std::os::raw::c_int,
        rank: usize,
        dtype: mlx_dtype,
    ) -> ::std::os::raw::c_int;

    /// Copies the `bytes` bytes of a computed, row-contiguous array from an NVIDIA GPU. Does nothing if the
    /// host can read them in place. For MLX's CUDA build only.
    #[cfg(target_os = "linux")]
    pub fn etkv_mlx_array_read(
        done: *mut bool,
        to: *mut ::std::os::raw::c_void,
        bytes: usize,
        array: mlx_array,
    ) -> ::std::os::raw::c_int;

    /// Stores the address of the first element of an array or view, or 0 if its elements are not computed. For MLX's
    /// CUDA build only.
    #[cfg(target_os = "linux")]
    pub fn etkv_mlx_array_address(address: *mut u64, array: mlx_array) -> ::std::os::raw::c_int;

    /// Stores the name and the text of the custom kernel of an array that is not computed yet, and the number after
    /// the name in the names of the kernel's files. For other arrays the strings stay empty, and the number is 0.
    #[cfg(target_os = "linux")]
    pub fn etkv_mlx_kernel_text(
        name: *mut mlx_string,
        text: *mut mlx_string,
        number: *mut u64,
        made: mlx_array,
    ) -> ::std::os::raw::c_int;

    /// Does nothing. Calling it keeps libetkv_blas linked.
    #[cfg(target_os = "linux")]
    pub fn etkv_blas_keep();

    /// Loads the library that multiplies matrices for MLX on the CPU. Returns its name, a string of libetkv_blas.
    #[cfg(target_os = "linux")]
    pub fn etkv_blas_name() -> *const ::std::os::raw::c_char;

    /// Lets the process end with its own exit status if the CUDA driver shuts down before MLX. Without this call, MLX
    /// would abort the process. Call it after the first stream is created.
    pub fn etkv_mlx_end_without_driver();
}

/// The clock that seeds mlx-rs's random state. Only Apple's systems have this function.
///
/// Returns nanoseconds since the first call, plus the start of the process as Unix time, so that the values of two
/// processes differ.
#[cfg(not(target_vendor = "apple"))]
#[no_mangle]
pub extern "C" fn mach_approximate_time() -> u64 {
    use std::sync::OnceLock;
    use std::time::{Instant, SystemTime, UNIX_EPOCH};

    static START: OnceLock<(Instant, u64)> = OnceLock::new();
    let (start, unix) = START.get_or_init(|| {
        let unix = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |elapsed| elapsed.as_nanos() as u64);
        (Instant::now(), unix)
    });
    unix.wrapping_add(start.elapsed().as_nanos() as u64)
}
