//! KV caches in plain memory, and attention over them on the CPU.
//!
//! The kinds of caches come from `etkv_core`. This crate adds a [`Store`](etkv_core::Store) on
//! plain memory, and attention that reads rows as they are stored. It knows no MLX, no C++ and no
//! Python.

pub mod attention;
mod memory;
mod parallel;
mod view;

pub use parallel::{Parallel, Pool, Serial};
pub use view::{Plane, View};
