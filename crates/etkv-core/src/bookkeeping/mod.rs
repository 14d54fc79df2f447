//! Bookkeeping: which position lies in which slot. Integers only.
//!
//! This module knows no arrays, formats or layers. A cache asks for a plan, writes and reads its pools by the
//! plan, and commits it.

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
