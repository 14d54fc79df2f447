//! The C interface; `include/etkv/etkv.h` documents it.

mod boundary;
mod cache;
mod error;
mod process;
mod session;

pub(crate) use boundary::panic_error;
#[cfg(feature = "delegate")]
pub(crate) use error::report;
