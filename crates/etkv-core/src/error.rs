//! Errors: a status with a fixed number, and a message that names the value and the limit.

use std::fmt;
use std::sync::Arc;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an error. The numbers match `etkv.h` and are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(i32)]
pub enum Status {
    /// An argument is absent, negative, or of the wrong type or size.
    InvalidArgument = 1,
    /// The step or the sequence exceeds the cache's capacity.
    Capacity = 2,
    /// A position is negative, leaves a gap, or is not consecutive within its step.
    Position = 3,
    /// The registry has no cache under this key, or the program was loaded without a cache.
    NoCache = 4,
    /// The cache's kind does not support this call.
    Kind = 5,
    /// A tensor's shape does not match the cache or the program.
    Shape = 6,
    /// A tensor's dtype does not match the cache or the program.
    Dtype = 7,
    /// The program is damaged, or is not a program of this library.
    Program = 8,
    /// The program needs something that this build lacks.
    Unsupported = 9,
    /// The backend reported an error, or there is too little memory for buffers.
    Backend = 10,
    /// A step is open on this cache, and the call is allowed only without an open step. Or no step is open, and the
    /// call needs one.
    Step = 11,
    /// A defect inside this library.
    Internal = 12,
    /// A file with a cache's contents cannot be read or written, is damaged, or belongs to another version, model or
    /// config.
    File = 13,
    /// The program has a version that this build does not read.
    Version = 14,
}

impl Status {
    /// All statuses, in the order of their numbers.
    pub const ALL: [Self; 14] = [
        Self::InvalidArgument,
        Self::Capacity,
        Self::Position,
        Self::NoCache,
        Self::Kind,
        Self::Shape,
        Self::Dtype,
        Self::Program,
        Self::Unsupported,
        Self::Backend,
        Self::Step,
        Self::Internal,
        Self::File,
        Self::Version,
    ];

    /// Returns the name of the status, which is the same in every language: the name of the C constant without
    /// `ETKV_ERROR_`.
    pub fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "INVALID_ARGUMENT",
            Self::Capacity => "CAPACITY",
            Self::Position => "POSITION",
            Self::NoCache => "NO_CACHE",
            Self::Kind => "KIND",
            Self::Shape => "SHAPE",
            Self::Dtype => "DTYPE",
            Self::Program => "PROGRAM",
            Self::Unsupported => "UNSUPPORTED",
            Self::Backend => "BACKEND",
            Self::Step => "STEP",
            Self::Internal => "INTERNAL",
            Self::File => "FILE",
            Self::Version => "VERSION",
        }
    }

    /// Returns the status with this number.
    pub fn from_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|&status| status as i32 == number)
    }
}

/// An error. Unless its documentation says otherwise, the call that returned it changed nothing.
///
/// The message is complete: it includes the text of [`source`](std::error::Error::source). Two errors are equal if
/// their statuses and messages are equal.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    status: Status,
    message: String,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// Returns an error of this status with a message, which becomes one line.
    pub fn new(status: Status, message: impl fmt::Display) -> Self {
        // Names from a file may contain any character, but a message is one line.
        let message = message.to_string().replace(char::is_control, "?");
        Self { status, message, source: None }
    }

    /// Returns the error with its cause, an error of another library. [`source`](std::error::Error::source) returns
    /// the cause.
    pub fn caused_by(self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self { source: Some(Arc::new(source)), ..self }
    }

    /// Returns whether the cause of this error is an error of type `T`.
    pub(crate) fn is_caused_by<T: std::error::Error + 'static>(&self) -> bool {
        self.source.as_deref().is_some_and(|source| source.is::<T>())
    }

    /// Returns the status.
    pub fn status(&self) -> Status {
        self.status
    }

    /// Returns the message.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the error with its context prepended: `place: message`.
    pub fn at(self, place: impl fmt::Display) -> Self {
        let placed = Self::new(self.status, format_args!("{place}: {}", self.message));
        Self { source: self.source, ..placed }
    }
}

impl PartialEq for Error {
    fn eq(&self, other: &Self) -> bool {
        (self.status, &self.message) == (other.status, &other.message)
    }
}

impl Eq for Error {}

/// Returns early with an error of the given [`Status`].
#[macro_export]
macro_rules! fail {
    ($status:ident, $($message:tt)+) => {
        return Err($crate::Error::new($crate::Status::$status, format!($($message)+)).into())
    };
}
pub use crate::fail;

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn errors_keep_their_cause() {
        let cause = "x".parse::<i32>().unwrap_err();
        let words = cause.to_string();
        let error = Error::new(Status::Program, &cause).caused_by(cause).at("layer 3").at("here");
        assert_eq!(error.to_string(), format!("here: layer 3: {words}"));
        assert_eq!(error.source().unwrap().to_string(), words);
        assert_eq!(error, Error::new(Status::Program, error.message()));
        assert!(Error::new(Status::Program, "alone").source().is_none());
    }
}
