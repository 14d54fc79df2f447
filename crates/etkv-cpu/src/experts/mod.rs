//! Mixtures of experts: the products of tokens with the weights of the experts that a router chose for them.
//!
//! The pairs of a token and an expert are sorted by expert. Then each expert's weights are read once in a step,
//! whatever the number of its tokens, and the weights of other experts not at all. Weights stay where they are,
//! in the file that the program was mapped from, in the layout of [`linear`](crate::linear).
//!
//! An output is a sum over its experts in ascending order. Each term comes from one sequence of float
//! operations, whatever the other tokens of the step and the number of threads are. So the same text gives the
//! same bits however it is cut into steps.

mod activation;
mod routing;
mod run;
mod sizes;
#[cfg(test)]
mod tests;
mod workspace;

pub use activation::{Activation, Function};
pub use run::{route_into, Inputs};
pub use sizes::Experts;
pub use workspace::Workspace;
