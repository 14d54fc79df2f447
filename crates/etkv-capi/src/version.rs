//! Versions of the library and its dependencies.

use std::ffi::c_char;

/// Returns the version of the interface of this library.
#[no_mangle]
pub extern "C" fn etkv_abi_version() -> u32 {
    17
}

/// Returns the library's version.
#[no_mangle]
pub extern "C" fn etkv_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Returns the version of the MLX that the process runs on.
#[no_mangle]
pub extern "C" fn etkv_mlx_version() -> *const c_char {
    mlx::version().as_ptr()
}

/// Returns the name of the library that multiplies matrices for MLX on the CPU.
#[no_mangle]
pub extern "C" fn etkv_mlx_blas() -> *const c_char {
    mlx::blas().as_ptr()
}

#[cfg(feature = "mlx")]
mod mlx {
    use std::ffi::{CStr, CString};
    use std::sync::LazyLock;

    use etkv::mlx;

    pub fn version() -> &'static CStr {
        static VERSION: LazyLock<CString> =
            LazyLock::new(|| CString::new(mlx::version()).unwrap_or_default());
        &VERSION
    }

    pub fn blas() -> &'static CStr {
        static NAME: LazyLock<CString> =
            LazyLock::new(|| CString::new(mlx::blas()).unwrap_or_default());
        &NAME
    }
}

/// A build without MLX.
#[cfg(not(feature = "mlx"))]
mod mlx {
    use std::ffi::CStr;

    pub fn version() -> &'static CStr {
        c""
    }

    pub fn blas() -> &'static CStr {
        c""
    }
}
