//! Bookkeeping, in integers only: the slot of each position.
//!
//! This module has no notion of arrays, formats or layers. A cache requests a plan, writes and reads its buffers
//! accordingly, and commits the plan.

mod cells;
mod contiguous;
mod mask_runs;
mod plan;
mod recurrent;
mod window;

pub use cells::{AddedStep, CellsBookkeeping, RecurrentWindow, MAX_SEQUENCES};
pub use contiguous::{ContiguousBookkeeping, ContiguousPlan};
pub use mask_runs::MaskRuns;
pub use plan::{LayerGroupPlan, MaskPlan, Move, Slots};
pub use recurrent::{AnchorSource, Chain, RecurrentPlan, RowSource, BLOCK};
pub use window::Window;
