//! Which position lies in which slot: integers only.
//!
//! Nothing here knows arrays, formats or layers. A cache asks for a plan, lets
//! its pools do as it says, and commits it.

mod cells;
mod contiguous;
mod plan;
mod window;

pub use cells::{CellsBookkeeping, MAX_SEQUENCES};
pub use contiguous::{ContiguousBookkeeping, ContiguousPlan};
pub use plan::{LayerGroupPlan, MaskPlan, Move, Slots};
pub use window::Window;
