//! `etkv_error`: an error that the caller owns.

use std::ffi::{c_char, CStr, CString};

use etkv_core::{fail, Error, Result, Status};

use super::boundary::{boundary, free, lasting, text};
use super::fork;
use super::handle::{self, Object};

/// ETKV_OK.
pub(crate) const OK: i32 = 0;

/// An error: a status and a message.
#[allow(non_camel_case_types)]
pub struct etkv_error {
    status: i32,
    message: CString,
}

impl Object for etkv_error {
    const NAME: &'static str = "etkv_error";
    const IN_USE: bool = false;
}

impl etkv_error {
    /// Makes a handle on an error, for the caller.
    pub(crate) fn give(error: &Error) -> *mut Self {
        handle::give(Self::new(error.status() as i32, error.message()))
    }

    /// Makes an error from a status and a message.
    pub(crate) fn new(status: i32, message: &str) -> Self {
        let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
        Self { status, message }
    }

    /// Returns the number of its status.
    pub(crate) fn status(&self) -> i32 {
        self.status
    }

    /// Returns its message.
    pub(crate) fn message(&self) -> &CStr {
        &self.message
    }
}

/// Returns the result of a callback of the host: its status, and its error object, which this
/// frees.
pub(super) fn from_host(status: i32, error: *mut etkv_error, what: &str) -> Result<()> {
    let message = handle::look_up(error, "error")
        .ok()
        .map(|error| error.message().to_string_lossy().into_owned());
    free(error);
    if status == OK {
        return Ok(());
    }
    let words = message.unwrap_or_else(|| format!("the host's {what} failed with status {status}"));
    Err(Error::new(Status::from_number(status).unwrap_or(Status::Internal), words))
}

/// Returns the name of a status.
#[no_mangle]
pub extern "C" fn etkv_status_name(status: i32) -> *const c_char {
    match Status::from_number(status) {
        _ if status == OK => c"OK".as_ptr(),
        Some(status) => lasting(status.name()),
        None => c"UNKNOWN".as_ptr(),
    }
}

/// Makes an error, for a callback to store. Returns NULL for a status that is not an error's.
///
/// # Safety
/// `message` is NULL or points to a string that ends in a zero byte.
#[no_mangle]
pub unsafe extern "C" fn etkv_error_new(status: i32, message: *const c_char) -> *mut etkv_error {
    let mut made = std::ptr::null_mut();
    // SAFETY: no place for an error is passed, and the caller guarantees the string.
    unsafe {
        boundary(std::ptr::null_mut(), || {
            let Some(status) = Status::from_number(status) else {
                fail!(InvalidArgument, "status is {status}, that of no error");
            };
            made = etkv_error::give(&Error::new(status, text(message, "message")?));
            Ok(())
        })
    };
    made
}

/// Returns the status of `error`; ETKV_OK if it is NULL.
#[no_mangle]
pub extern "C" fn etkv_error_status(error: *const etkv_error) -> i32 {
    if error.is_null() {
        return OK;
    }
    if fork::happened() {
        return fork::STATUS as i32;
    }
    handle::look_up(error, "error").map_or(Status::InvalidArgument as i32, |error| error.status())
}

/// Returns the message of `error`; "" if it is NULL.
#[no_mangle]
pub extern "C" fn etkv_error_message(error: *const etkv_error) -> *const c_char {
    if error.is_null() {
        return c"".as_ptr();
    }
    if fork::happened() {
        return fork::MESSAGE.as_ptr();
    }
    match handle::look_up(error, "error") {
        // The table of handles keeps the string until the handle is freed.
        Ok(error) => error.message().as_ptr(),
        Err(_) => c"this is no etkv_error, or no longer".as_ptr(),
    }
}

/// Frees an error.
#[no_mangle]
pub extern "C" fn etkv_error_free(error: *mut etkv_error) {
    free(error);
}
