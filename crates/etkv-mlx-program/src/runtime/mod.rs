//! Loaded programs: constants, buffers, streams, and the run of a step.

mod buffers;
mod constants;
mod program;
mod schedule;
mod step_executor;
mod stream;
mod text_inputs;

pub use self::constants::ConstantSource;
pub use self::program::Program;
pub use self::step_executor::{
    RequestedOutputs, RowsInput, StepCompiler, StepExecutor, StepOutputs, StepSignature,
    StepTokens, TakeOutputs,
};
pub use self::text_inputs::{TextInputs, Tokens};
