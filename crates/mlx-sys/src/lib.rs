//! Raw bindings to mlx-c, linked to the MLX that pip installs.
//!
//! A stand-in for the published crate of the same name and version, which
//! builds MLX from source and only on Apple's systems. The workspace puts it in
//! place with `[patch.crates-io]`; `mlx-rs` cannot tell the difference.
#![allow(non_upper_case_globals, non_camel_case_types, non_snake_case)]
#![allow(clippy::all)]

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));

/// Half types and the functions that take them: mlx-c declares these only where
/// the C compiler has them, which on x86-64 it does not.
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
    /// Stores the array that `written` becomes when the writes to it that were not
    /// carried out are left away. Not found, and nothing stored, where something
    /// else than writes is still to be carried out.
    pub fn etkv_mlx_array_before_writes(
        before: *mut mlx_array,
        found: *mut bool,
        written: mlx_array,
    ) -> ::std::os::raw::c_int;

    /// Stores an array of `bytes` bytes of the host's that a GPU reads where they are. Not made, and
    /// nothing stored, for more than 64 KiB, and while too many of these arrays exist. For MLX's build
    /// for CUDA only.
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

    /// Copies the elements of a computed, row-contiguous array on an NVIDIA GPU, `bytes` bytes. Not
    /// done where the host can read them in place. For MLX's build for CUDA only.
    #[cfg(target_os = "linux")]
    pub fn etkv_mlx_array_read(
        done: *mut bool,
        to: *mut ::std::os::raw::c_void,
        bytes: usize,
        array: mlx_array,
    ) -> ::std::os::raw::c_int;

    /// Stores where the elements of an array of MLX for CUDA begin, or 0 if they are not computed. It is
    /// the first element also where the array is a view. For MLX's build for CUDA only.
    #[cfg(target_os = "linux")]
    pub fn etkv_mlx_array_address(address: *mut u64, array: mlx_array) -> ::std::os::raw::c_int;

    /// Stores the name and the text of the custom kernel that makes an array which is not computed, and the number
    /// behind the name in the names of its files. They stay empty, and the number 0, for other arrays.
    #[cfg(target_os = "linux")]
    pub fn etkv_mlx_kernel_text(
        name: *mut mlx_string,
        text: *mut mlx_string,
        number: *mut u64,
        made: mlx_array,
    ) -> ::std::os::raw::c_int;

    /// Does nothing. A call of it makes a linker keep libetkv_blas.
    #[cfg(target_os = "linux")]
    pub fn etkv_blas_keep();

    /// What multiplies matrices for MLX on the CPU: a string of libetkv_blas's. Loads that library.
    #[cfg(target_os = "linux")]
    pub fn etkv_blas_name() -> *const ::std::os::raw::c_char;

    /// From now on, the process ends with its own status where MLX would abort it
    /// for a CUDA driver that ended first. For after the first stream was made.
    pub fn etkv_mlx_end_without_driver();
}

/// The clock that mlx-rs seeds its random state from; Apple's kernel has it,
/// others do not.
///
/// Returns nanoseconds since the first call, plus the process's start as Unix
/// time, so that two processes differ.
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
