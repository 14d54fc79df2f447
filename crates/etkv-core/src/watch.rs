//! What a running cache tells of itself: spans and events of `tracing`.
//!
//! This crate only emits. Without a subscriber each of them costs a look at a number, and
//! nothing is formatted.
//!
//! | level | what |
//! | --- | --- |
//! | error | a cache that is poisoned |
//! | warn | a step that is refused or rolled back, a conversion that failed |
//! | info | a conversion |
//! | debug | the spans `step`, `grow`, `convert`, `compact` and `move` |
//! | trace | what each layer of a step writes and reads |

use crate::bookkeeping::{LayerGroupPlan, MaskPlan};

/// The target of this crate's spans and events.
pub const TARGET: &str = "etkv::core";

/// The name of a mask.
pub(crate) fn mask(plan: &LayerGroupPlan) -> &'static str {
    match plan.mask {
        MaskPlan::None => "none",
        MaskPlan::Causal => "causal",
        MaskPlan::Explicit(_) => "explicit",
    }
}

/// The masks of these plans, each named once.
pub(crate) fn masks<'a>(plans: impl Iterator<Item = &'a LayerGroupPlan>) -> String {
    let mut names: Vec<&str> = plans.map(mask).collect();
    names.sort_unstable();
    names.dedup();
    names.join(",")
}
