//! Where Rust ends: no panic and no error gets past here except as a status.

use std::any::Any;
use std::ffi::{c_char, CStr};
use std::panic::{catch_unwind, AssertUnwindSafe};

use super::error::{etkv_error, OK};
use crate::error::{fail, Error, Result, Status};

/// Runs the body of a C function: turns an error or a panic into a status, and
/// into an error object where the caller wants one.
///
/// # Safety
/// `error` is NULL or points to writable memory for one pointer.
pub(crate) unsafe fn boundary(
    error: *mut *mut etkv_error,
    body: impl FnOnce() -> Result<()>,
) -> i32 {
    let result =
        catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(panic_error(&*panic)));
    match result {
        Ok(()) => OK,
        Err(failure) => {
            let status = failure.status() as i32;
            if !error.is_null() {
                // SAFETY: the caller says so.
                unsafe { *error = etkv_error::boxed(failure) };
            }
            status
        }
    }
}

/// What a panic becomes.
pub(crate) fn panic_error(panic: &(dyn Any + Send)) -> Error {
    let words = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| String::from("no message"));
    Error::new(Status::Internal, format!("a defect in etkv: {words}"))
}

/// The object behind a handle.
///
/// # Safety
/// `pointer` is NULL or points to a live `T` that nobody changes meanwhile.
pub(crate) unsafe fn object<'a, T>(pointer: *const T, name: &str) -> Result<&'a T> {
    // SAFETY: the caller says so.
    match unsafe { pointer.as_ref() } {
        Some(object) => Ok(object),
        None => fail!(InvalidArgument, "{name} is NULL"),
    }
}

/// The text behind a C string.
///
/// # Safety
/// `pointer` is NULL or points to a string that ends in a zero byte.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Result<&'a str> {
    if pointer.is_null() {
        fail!(InvalidArgument, "{name} is NULL");
    }
    // SAFETY: the caller says so.
    match unsafe { CStr::from_ptr(pointer) }.to_str() {
        Ok(text) => Ok(text),
        Err(_) => fail!(InvalidArgument, "{name} is not UTF-8"),
    }
}

/// Refuses an out-parameter that is NULL, before anything is done.
pub(crate) fn out<T>(pointer: *mut T, name: &str) -> Result<*mut T> {
    if pointer.is_null() {
        fail!(InvalidArgument, "{name} is NULL");
    }
    Ok(pointer)
}

/// Refuses a struct of a caller that was compiled with less than `needed` bytes
/// of it.
pub(crate) fn check_struct(found: usize, needed: usize, name: &str) -> Result<()> {
    if found < needed {
        fail!(InvalidArgument, "{name}.struct_size is {found}, the least is {needed}");
    }
    Ok(())
}
