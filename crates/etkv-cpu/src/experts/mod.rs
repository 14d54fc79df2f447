//! Mixtures of experts: products of tokens with the weights of the experts that a router has chosen.
//!
//! The pairs of a token and an expert are sorted by expert. So the weights of a chosen expert are read once
//! in a step, and those of other experts are not read. Weights are not copied from the mapped file of the
//! program. Their layout is that of [`linear`](crate::linear).
//!
//! An output is a sum over a token's experts in ascending order. Each term is computed by the same sequence
//! of float operations, independent of other tokens of the step and of the number of threads. So the results
//! of a text have the same bits for any division into steps.

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
