//! The C interface; `include/etkv/etkv.h` documents it. Caches are stored in plain memory or, with the feature `mlx`,
//! in MLX arrays. The feature `delegate` adds the bridge to ExecuTorch's backends.
//!
//! Each file has the functions of one header or of one section of it: `tree.rs` has the functions of trees in
//! `include/etkv/seq.h`. `boundary` and `handle` serve all of them.
//!
//! This is the only crate that exports C symbols.

mod backends;
mod boundary;
#[cfg(feature = "delegate")]
mod bridge;
mod cache;
mod config;
mod delegate;
mod error;
mod fork;
#[cfg(feature = "mlx")]
mod forwards;
mod generation;
mod handle;
mod kinds;
mod lifetimes;
mod log;
mod memory;
mod metadata;
mod prefix;
mod prefix_cache;
mod prefix_store;
mod process;
mod registry;
mod report;
mod sampling;
mod saving;
mod seq;
mod session;
mod tree;
mod version;
