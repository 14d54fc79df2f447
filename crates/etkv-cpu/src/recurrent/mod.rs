//! Recurrent layers: causal convolutions, and linear recurrences with or without the delta rule.
//!
//! A step's [`RecurrentPlan`](etkv_core::bookkeeping::RecurrentPlan) defines the rows before each token, and
//! the anchor from which a recurrence starts. Each element of an output, a row or an anchor is computed by
//! the same sequence of float operations, independent of the steps, the threads and the chains. Sums over the
//! channels of a key and over the rows of a block are in ascending order. Each element of a value has a
//! separate lane, and products of keys always use the same lanes. So the results of a text have the same bits
//! for any division into steps.

mod channels;
mod check;
mod convolve;
mod exp;
mod fold;
mod job;
mod kernels;
mod layout;
mod load;
mod scan;
mod task;
#[cfg(test)]
mod tests;
mod workspace;

pub(crate) use exp::exp;

pub use convolve::{convolve, convolve_into, Activation, ConvolveInputs};
pub use job::{Scan, ScanInputs};
pub use scan::{scan, scan_into};
pub use workspace::Workspace;
