//! The calls of a CPU program that etkv runs. ExecuTorch and XNNPACK run the others.
//!
//! The exporter makes each call a separate delegate, with a `payload` that describes it. A loaded method has
//! one [`Call`] for each. Those of layers share a `forward`: the step that is open on the cache from the
//! first of them to the last.

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
