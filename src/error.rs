//! Errors of the core, and errors that MLX reports.

use std::fmt;
use std::ops::Deref;

pub use etkv_core::{fail, Status};

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the core, or one that MLX reports. It converts to the core's error and back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error(etkv_core::Error);

impl Error {
    /// Returns an error of this status with a message of one line.
    pub fn new(status: Status, message: impl fmt::Display) -> Self {
        Self(etkv_core::Error::new(status, message))
    }

    /// Returns the error with its cause, an error of another library.
    pub fn caused_by(self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self(self.0.caused_by(source))
    }

    /// Returns the error with its context prepended: `place: message`.
    pub fn at(self, place: impl fmt::Display) -> Self {
        Self(self.0.at(place))
    }
}

impl Deref for Error {
    type Target = etkv_core::Error;

    fn deref(&self) -> &etkv_core::Error {
        &self.0
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        self.0.fmt(out)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

impl From<etkv_core::Error> for Error {
    fn from(error: etkv_core::Error) -> Self {
        Self(error)
    }
}

impl From<Error> for etkv_core::Error {
    fn from(error: Error) -> Self {
        error.0
    }
}
