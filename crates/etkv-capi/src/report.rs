//! Reports as JSON: of caches, of the process and of programs.

use std::ffi::{c_char, CString};

use etkv_core::{Error, ProcessReport, Result, Status};
use serde::Serialize;

use super::boundary::{c_functions, list, put};
use super::cache::etkv_cache;
use super::handle;

c_functions!(
    /// Stores a report of a cache.
    unsafe fn etkv_cache_report(cache: *const etkv_cache, json: *mut *mut c_char) -> Result<()> {
        put(json, "json", || {
            let report = handle::look_up(cache, "cache")?.cache.lock()?.report();
            text_of(&report)
        })
    }

    /// Stores a report of this process.
    unsafe fn etkv_process_report(json: *mut *mut c_char) -> Result<()> {
        put(json, "json", || text_of(&ProcessReport::now()))
    }

    /// Stores a description of a program.
    unsafe fn etkv_program_describe(
        payload: *const u8,
        n_bytes: usize,
        json: *mut *mut c_char,
    ) -> Result<()> {
        put(json, "json", || describe(list(payload, n_bytes, "payload")?))
    }
);

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
