//! Programs of ExecuTorch's MLX delegate: from the payload in a `.pte` file to a forward on a
//! cache.
//!
//! ```text
//! payload (verified flatbuffer) -> decode -> ir -> passes -> load -> interpreter
//! ```
//!
//! The payload is read once. The interpreter runs `ir`: typed instructions over values that are
//! each written once. What can be computed before a run is computed before it.

#[cfg(test)]
mod allocations;
mod bound;
mod buffers;
mod by_capacity;
#[cfg(target_os = "linux")]
mod captured;
mod constants;
mod decode;
mod describe;
mod dtype;
mod error;
mod execute;
mod frame;
mod generation;
mod interpreter;
mod ir;
mod limits;
mod ops;
mod passes;
mod payload;
mod slots;
mod stream;
#[cfg(test)]
mod tests;
mod warm_up;

pub use constants::ConstantSource;
pub use describe::{
    ArgumentDescription, AttentionDescription, ChangeDescription, ConstantDescription,
    ConstantsDescription, DimDescription, InstructionDescription, LayoutsDescription,
    OperationCount, PassDescription, ProgramDescription,
};
pub use etkv_host::{Argument, Host, LoadOptions, LogitsRows, Passes, Sampling};
pub use execute::Program;
pub use generation::{End, Generated, Generation, GenerationOptions, Prompt, RunAhead};
#[doc(hidden)]
pub use limits::set_most_bytes;

/// The target of the spans and events of programs.
const TARGET: &str = "etkv::program";

/// The reader that `flatc` makes of ExecuTorch's schema.
#[allow(
    clippy::all,
    clippy::pedantic,
    clippy::undocumented_unsafe_blocks,
    clippy::unwrap_used,
    elided_lifetimes_in_paths,
    missing_docs,
    mismatched_lifetime_syntaxes,
    unsafe_op_in_unsafe_fn,
    unused_imports
)]
mod schema {
    include!(concat!(env!("OUT_DIR"), "/schema_generated.rs"));
}
use schema::mlx_delegate as fb;
