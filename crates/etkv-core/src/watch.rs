//! Spans and events of `tracing` that a running cache emits.
//!
//! Without a subscriber, each span or event costs one integer comparison, and nothing is formatted.
//!
//! | level | what |
//! | --- | --- |
//! | error | a cache is poisoned |
//! | warn | a step is refused or rolled back, a conversion fails |
//! | info | a cache is converted |
//! | debug | the spans `step`, `grow`, `convert`, `compact` and `move` |
//! | trace | what each layer of a step writes and reads |

use crate::bookkeeping::{LayerGroupPlan, MaskPlan};

/// The target of this crate's spans and events.
pub const TARGET: &str = "etkv::core";

/// Returns the name of a mask.
pub(crate) fn mask(plan: &LayerGroupPlan) -> &'static str {
    match plan.mask {
        MaskPlan::None => "none",
        MaskPlan::Causal => "causal",
        MaskPlan::Explicit(_) => "explicit",
    }
}

/// Returns the distinct names of the masks of these plans, separated by commas.
pub(crate) fn masks<'a>(plans: impl Iterator<Item = &'a LayerGroupPlan>) -> String {
    let mut names: Vec<&str> = plans.map(mask).collect();
    names.sort_unstable();
    names.dedup();
    names.join(",")
}
