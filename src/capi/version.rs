//! Versions.

use std::ffi::{c_char, CString};
use std::sync::LazyLock;

/// The interface that this library has.
#[no_mangle]
pub extern "C" fn etkv_abi_version() -> u32 {
    1
}

/// The library's version.
#[no_mangle]
pub extern "C" fn etkv_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The version of the MLX that the process runs on.
#[no_mangle]
pub extern "C" fn etkv_mlx_version() -> *const c_char {
    static VERSION: LazyLock<CString> =
        LazyLock::new(|| CString::new(crate::mlx::version()).unwrap_or_default());
    VERSION.as_ptr()
}
