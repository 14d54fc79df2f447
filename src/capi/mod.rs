//! The C interface; `include/etkv/etkv.h` documents it.

mod boundary;
mod cache;
mod config;
mod custom;
mod delegate;
mod error;
mod forwards;
mod handle;
mod memory;
mod process;
mod registry;
mod seq;
mod session;
mod tree;

pub(crate) use boundary::panic_error;
#[cfg(feature = "delegate")]
pub(crate) use delegate::{or_of_thread, report};
