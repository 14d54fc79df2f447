//! `etkv_error`: an error that the caller owns.

use std::ffi::{c_char, CStr, CString};

use etkv_core::{Error, Status};

use super::fork;
use super::handle::{self, Object};
use super::lifetimes::{free, lasting};

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
    /// Returns a new handle on an error, which the caller frees.
    pub(crate) fn give(error: &Error) -> *mut Self {
        handle::give(Self::new(error.status() as i32, error.message()))
    }

    /// Creates an error from a status and a message.
    pub(crate) fn new(status: i32, message: &str) -> Self {
        let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
        Self { status, message }
    }

    /// Returns the number of the error's status.
    pub(crate) fn status(&self) -> i32 {
        self.status
    }

    /// Returns the error's message.
    pub(crate) fn message(&self) -> &CStr {
        &self.message
    }
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
        Err(_) => c"this is not a live etkv_error".as_ptr(),
    }
}

/// Frees an error.
#[no_mangle]
pub extern "C" fn etkv_error_free(error: *mut etkv_error) {
    free(error);
}
