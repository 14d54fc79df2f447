//! The C interface; `include/etkv/etkv.h` documents it. With the feature `delegate` also
//! the bridge to ExecuTorch's backend.
//!
//! This is the only crate that exports C symbols.

mod boundary;
#[cfg(feature = "delegate")]
mod bridge;
mod cache;
mod config;
mod custom;
mod delegate;
mod error;
mod error_calls;
mod forwards;
mod handle;
mod log;
mod memory;
mod process;
mod registry;
mod report;
mod seq;
mod session;
mod tree;
