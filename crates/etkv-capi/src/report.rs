//! Reports as JSON: of caches, of the process and of programs.

use std::ffi::{c_char, CString};

use etkv_core::{Error, ProcessReport, Result, Status};
use serde::Serialize;

use super::boundary::{boundary, list, out};
use super::cache::etkv_cache;
use super::error::etkv_error;
use super::handle;

/// Stores a report of a cache.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_cache_report(
    cache: *const etkv_cache,
    json: *mut *mut c_char,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller keeps the contract above.
    unsafe {
        boundary(error, || {
            let target = out(json, "json")?;
            let report = handle::look_up(cache, "cache")?.cache.lock()?.report();
            target.write(text_of(&report)?);
            Ok(())
        })
    }
}

/// Stores a report of this process.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_process_report(
    json: *mut *mut c_char,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller keeps the contract above.
    unsafe {
        boundary(error, || {
            let target = out(json, "json")?;
            target.write(text_of(&ProcessReport::now())?);
            Ok(())
        })
    }
}

/// Stores a description of a program.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_program_describe(
    payload: *const u8,
    n_bytes: usize,
    json: *mut *mut c_char,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller keeps the contract above.
    unsafe {
        boundary(error, || {
            let target = out(json, "json")?;
            target.write(describe(list(payload, n_bytes, "payload")?)?);
            Ok(())
        })
    }
}

/// Frees a string.
///
/// # Safety
/// `string` is NULL, or a string that a function of this interface stored and that is not freed
/// yet.
#[no_mangle]
pub unsafe extern "C" fn etkv_string_free(string: *mut c_char) {
    if !string.is_null() {
        // SAFETY: the caller keeps the contract above.
        drop(unsafe { CString::from_raw(string) });
    }
}

#[cfg(feature = "mlx-programs")]
fn describe(payload: &[u8]) -> Result<*mut c_char> {
    let steps = etkv_mlx_cuda::step_compiler();
    text_of(&etkv_mlx_program::Program::describe(payload, steps)?)
}

#[cfg(not(feature = "mlx-programs"))]
fn describe(_: &[u8]) -> Result<*mut c_char> {
    etkv_core::fail!(Unsupported, "this libetkv was built without the interpreter of MLX programs");
}

/// Returns JSON as a string for the caller, which frees it.
pub(super) fn text_of(report: &impl Serialize) -> Result<*mut c_char> {
    let internal = |error: &dyn std::fmt::Display| Error::new(Status::Internal, error);
    let json = serde_json::to_string(report).map_err(|error| internal(&error))?;
    // JSON has no zero byte.
    string(json)
}

/// Returns a text without zero bytes as a string for the caller, which frees it.
pub(super) fn string(text: String) -> Result<*mut c_char> {
    let internal = |error| Error::new(Status::Internal, error);
    Ok(CString::new(text).map_err(internal)?.into_raw())
}
