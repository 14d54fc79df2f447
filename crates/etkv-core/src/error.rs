//! What can go wrong, once: a status that never changes its number, and a
//! sentence that names the value and the limit.

use std::fmt;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an error. The numbers are those of `etkv.h` and are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(i32)]
pub enum Status {
    /// An argument cannot be: absent, negative, of the wrong type or size.
    InvalidArgument = 1,
    /// The step or the sequence does not fit in the cache's capacity.
    Capacity = 2,
    /// A position is negative, leaves a gap, or breaks the run of its step.
    Position = 3,
    /// No cache is known by this key, or the program was loaded without one.
    NoCache = 4,
    /// The cache is of a kind that cannot do this.
    Kind = 5,
    /// A tensor's shape does not match the cache or the program.
    Shape = 6,
    /// A tensor's dtype does not match the cache or the program.
    Dtype = 7,
    /// The program is damaged, foreign, or of a newer format.
    Program = 8,
    /// The program needs something that this build does not have.
    Unsupported = 9,
    /// The backend reported an error, out of memory among them.
    Backend = 10,
    /// A step is open on this cache, or none is.
    Step = 11,
    /// A defect inside this crate.
    Internal = 12,
}

impl Status {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 12] = [
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
    ];

    /// The name that it has in every language: that of C's constant without `ETKV_ERROR_`.
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
        }
    }

    /// The status of this number.
    pub fn from_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|&status| status as i32 == number)
    }
}

/// An error: nothing that it is about has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    status: Status,
    message: String,
}

impl Error {
    /// An error of this kind, with a sentence for people.
    pub fn new(status: Status, message: impl fmt::Display) -> Self {
        // Names out of a file may hold anything; a message is one line of text.
        let message = message.to_string().replace(char::is_control, "?");
        Self { status, message }
    }

    /// Its kind.
    pub fn status(&self) -> Status {
        self.status
    }

    /// The sentence.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The same error, telling where it happened: `place: sentence`.
    pub fn at(self, place: impl fmt::Display) -> Self {
        Self::new(self.status, format_args!("{place}: {}", self.message))
    }
}

/// Returns early with an error of the given [`Status`].
#[macro_export]
macro_rules! fail {
    ($status:ident, $($message:tt)+) => {
        return Err($crate::Error::new($crate::Status::$status, format!($($message)+)).into())
    };
}
pub use crate::fail;
