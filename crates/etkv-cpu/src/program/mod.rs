//! The calls of a CPU program that etkv runs. ExecuTorch and XNNPACK run the other parts of the program.
//!
//! The exporter writes each call as a separate delegate, with a `payload` that describes it. A loaded method
//! has a [`Call`] for each. The calls of layers share a `forward`: a step of the cache, which begins with the
//! first of these calls and is committed after the last.

mod argument;
mod attend;
mod by_capacity;
mod call;
mod experts;
mod forward;
mod linear;
mod payload;
mod recurrent;
mod rows;

pub use call::Call;
pub use forward::abort_forward;

/// The target of the spans and events of programs.
const TARGET: &str = "etkv::program";
