//! The kernels of recurrent layers: causal convolutions, and linear recurrences with or without the delta
//! rule.
//!
//! A step's [`RecurrentPlan`](etkv_core::bookkeeping::RecurrentPlan) says which rows precede each token, and
//! from which anchor a recurrence starts. Every element of an output, a row or an anchor comes from one
//! sequence of float operations, whatever the step, the number of threads and the chains are: sums go over
//! the channels of a key and over the rows of a block in ascending order, with the elements of a value in
//! lanes of their own, and products of keys use the same lanes everywhere. So the same text gives the same
//! bits however it is cut into steps.

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
