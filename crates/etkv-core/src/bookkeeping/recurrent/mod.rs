//! Recurrent layers: which rows and anchors a sequence keeps, and what a step reads and writes of them.

mod plan;

pub use plan::{AnchorSource, Chain, RecurrentPlan, RowSource, BLOCK};
