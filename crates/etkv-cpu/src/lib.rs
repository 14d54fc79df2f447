//! KV caches in plain memory, and attention over them on the CPU.
//!
//! The kinds of caches come from `etkv_core`. This crate adds a [`Store`](etkv_core::Store) on plain memory,
//! attention that reads rows as they are stored, and the attention calls of ExecuTorch's programs. It depends
//! on no MLX, C++ or Python.
//!
//! Rows are stored with the same bits as etkv's storage on MLX arrays, in every format.

mod attend;
pub mod attention;
mod backend;
pub mod experts;
mod floats;
pub mod linear;
mod memory;
mod parallel;
pub mod program;
pub mod recurrent;
mod simd;
mod store;
mod tensor;

pub use attend::attend;
pub use backend::{
    builders, CellsCache, ContiguousCache, CpuCache, ProgramCache, Step, CPU_BACKEND,
};
pub use parallel::{Parallel, Serial};
pub use store::view::{Plane, View};
pub use store::{CpuStore, SavedRows};
pub use tensor::{Dtype, Tensor, Values};
