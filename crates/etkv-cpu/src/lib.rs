//! KV caches in plain memory, and attention over them on the CPU.
//!
//! The cache kinds are those of `etkv_core`. This crate adds a [`Store`](etkv_core::Store) in plain memory,
//! attention that reads rows in their storage format, and the calls of ExecuTorch programs. It does not
//! depend on MLX, C++ or Python.
//!
//! In every format, rows are stored with the same bits as on MLX arrays.

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

#[cfg(test)]
#[path = "../tests/refused/mod.rs"]
mod refused;

pub use attend::attend;
pub use backend::{
    builders, CellsCache, ContiguousCache, CpuCache, ProgramCache, Step, CPU_BACKEND,
};
pub use parallel::{Parallel, Serial};
pub use store::view::{Plane, View};
pub use store::{CpuStore, SavedRows};
pub use tensor::{Dtype, Tensor, Values};
