//! Products with packed weights, and rows of packed embeddings.
//!
//! Weights are not copied from the mapped file of the program; `python/etkv/packed_weights.py` describes
//! their layout. The output head of a model and its embedding share weights.
//!
//! Each output is computed by the same sequence of float operations, independent of other tokens of the step
//! and of the number of threads. So the results of a text have the same bits for any division into steps.

pub(crate) mod blocks;
mod embedding;
pub(crate) mod float_tile;
pub(crate) mod integer_tile;
pub(crate) mod quantize;
mod run;
pub(crate) mod scales;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod tiles;
pub(crate) mod weights;
mod workspace;

pub use embedding::{embed_into, Embedding};
pub use run::{multiply_into, Linear, Product};
pub use scales::Scales;
pub use weights::WeightFormat;
pub use workspace::{Workspace, Workspaces};
