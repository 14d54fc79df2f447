//! `etkv_error`, an error that the caller owns: what is behind the handle.

use std::ffi::{CStr, CString};

use etkv_core::{Error, Status};

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
}

impl etkv_error {
    /// Moves an error to the caller's side.
    pub(crate) fn give(error: &Error) -> *mut Self {
        handle::give(Self::new(error.status() as i32, error.message()))
    }

    /// A status and a message.
    pub(crate) fn new(status: i32, message: &str) -> Self {
        let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
        Self { status, message }
    }

    /// The number of its status.
    pub(crate) fn status(&self) -> i32 {
        self.status
    }

    /// Its message.
    pub(crate) fn message(&self) -> &CStr {
        &self.message
    }
}

/// The statuses that there are, and with them their numbers.
const STATUSES: [Status; 12] = [
    Status::InvalidArgument,
    Status::Capacity,
    Status::Position,
    Status::NoCache,
    Status::Kind,
    Status::Shape,
    Status::Dtype,
    Status::Program,
    Status::Unsupported,
    Status::Mlx,
    Status::Step,
    Status::Internal,
];

/// The status with this number.
pub(crate) fn status_of(number: i32) -> Option<Status> {
    STATUSES.into_iter().find(|&status| status as i32 == number)
}
