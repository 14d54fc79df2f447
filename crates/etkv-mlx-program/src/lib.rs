//! Programs of ExecuTorch's MLX delegate: from the payload in a `.pte` file to a forward on a
//! cache.
//!
//! ```text
//! frontend: payload (verified flatbuffer) -> ir -> passes -> runtime: load, interpreter -> generation
//! ```
//!
//! The payload is read once. The interpreter runs `ir`: typed instructions over values that are each written once.
//! Everything that does not depend on inputs is computed at load.

mod describe;
mod dtype;
mod error;
mod frontend;
mod generation;
pub mod ir;
mod ops;
pub mod passes;
mod runtime;
#[cfg(test)]
mod tests;

pub use describe::{
    ArgumentDescription, AttentionDescription, ChangeDescription, ConstantDescription,
    ConstantsDescription, DimDescription, InstructionDescription, LayoutsDescription,
    OperationCount, PassDescription, ProgramDescription,
};
pub use dtype::{dtype_of, item_size, name as dtype_name};
pub use etkv_delegate::{Argument, Host, LoadOptions, LogitsRows, Passes, Sampling};
pub use generation::{End, Generated, Generation, GenerationOptions, Prompt, RunAhead};
#[doc(hidden)]
pub use ops::limits::set_max_bytes;
pub use runtime::{
    ConstantSource, Program, RequestedOutputs, RowsInput, StepCompiler, StepExecutor, StepOutputs,
    StepSignature, StepTokens, TakeOutputs, TextInputs,
};

/// The target of the spans and events of programs.
pub const TARGET: &str = "etkv::program";

/// The reader that `flatc` generates from ExecuTorch's schema.
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
