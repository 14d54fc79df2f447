//! `etkv_error`: an error that the caller owns.

use std::cell::RefCell;
use std::ffi::{c_char, CString};

use super::boundary;
use super::handle::{self, Object};
use crate::error::{Error, Status};

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
}

impl etkv_error {
    /// Moves an error to the caller's side.
    pub(crate) fn give(error: &Error) -> *mut Self {
        handle::give(Self::new(error.status() as i32, error.message()))
    }

    fn new(status: i32, message: &str) -> Self {
        let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
        Self { status, message }
    }
}

/// The status of `error`; ETKV_OK if it is NULL.
#[no_mangle]
pub extern "C" fn etkv_error_status(error: *const etkv_error) -> i32 {
    if error.is_null() {
        return OK;
    }
    handle::look_up(error, "error").map_or(Status::InvalidArgument as i32, |error| error.status)
}

/// The message of `error`; "" if it is NULL.
#[no_mangle]
pub extern "C" fn etkv_error_message(error: *const etkv_error) -> *const c_char {
    if error.is_null() {
        return c"".as_ptr();
    }
    match handle::look_up(error, "error") {
        // The table keeps what the string is in until the handle is freed.
        Ok(error) => error.message.as_ptr(),
        Err(_) => c"this is no etkv_error, or no longer".as_ptr(),
    }
}

/// Frees an error.
#[no_mangle]
pub extern "C" fn etkv_error_free(error: *mut etkv_error) {
    boundary::free(error);
}

thread_local! {
    static REPORTED: RefCell<Option<etkv_error>> = const { RefCell::new(None) };
}

/// Keeps the delegate's error for [`etkv_delegate_take_error`] on this thread.
#[cfg_attr(not(feature = "delegate"), allow(dead_code))]
pub(crate) fn report(status: i32, message: &str) {
    let status = if status == 0 { Status::Internal as i32 } else { status };
    REPORTED.with_borrow_mut(|kept| *kept = Some(etkv_error::new(status, message)));
}

/// Takes the error that the delegate last reported on the calling thread.
#[no_mangle]
pub extern "C" fn etkv_delegate_take_error() -> *mut etkv_error {
    REPORTED.with_borrow_mut(Option::take).map_or(std::ptr::null_mut(), handle::give)
}
