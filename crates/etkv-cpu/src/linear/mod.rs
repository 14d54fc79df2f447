//! Products with packed weights, and rows of packed embeddings.
//!
//! Weights stay where they are, in the file that the program was mapped from; `python/etkv/packed_weights.py`
//! describes their layout. The head of a model and its embedding read the same weights.
//!
//! An output is one sequence of float operations, whatever the other tokens of the step and the number of threads
//! are. So the same text gives the same bits however it is cut into steps.

pub(crate) mod blocks;
mod embedding;
pub(crate) mod float_tile;
pub(crate) mod integer_tile;
pub(crate) mod quantize;
mod run;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod tiles;
pub(crate) mod weights;
mod workspace;

pub use embedding::{embed_into, Embedding};
pub use run::{multiply_into, Linear, Product};
pub use weights::{Scales, WeightFormat};
pub(crate) use workspace::Pieces;
pub use workspace::{Workspace, Workspaces};
