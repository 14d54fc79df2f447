//! Memory for calls of experts, which the layers of a program share.

use etkv_core::Result;

use super::routing::Routing;
use super::sizes::Experts;
use crate::linear::blocks::Packed;
use crate::linear::WeightFormat;
use crate::memory::pieces::divide;
use crate::memory::Memory;

/// Memory for one call at a time. It grows to the size of the largest call, so only the first step of a shape
/// allocates.
#[derive(Debug, Default)]
pub struct Workspace {
    pub(super) memory: Option<Memory>,
    pub(super) routing: Routing,
}

/// The pieces of a call's memory. Their contents are arbitrary, but initialized.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pieces {
    /// The tokens in 8 bits, `[T, hidden]`, with the scales and starts of their groups, `[T, groups]`.
    pub tokens: Packed,
    /// The inputs of the first products for all pairs.
    pub first: Packed,
    /// The inputs of the second products for all pairs.
    pub second: Packed,
}

impl Workspace {
    /// Returns its number of bytes.
    pub fn size(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.bytes().len())
    }
}

impl Pieces {
    /// Returns the pieces of a call.
    ///
    /// # Errors
    /// [`Backend`](etkv_core::Status::Backend) if memory is lacking.
    pub fn of(
        memory: &mut Option<Memory>,
        experts: &Experts,
        n_tokens: usize,
        n_pairs: usize,
    ) -> Result<Self> {
        let [group, second_group] = experts.weights.map(WeightFormat::group);
        let (hidden, intermediate) = (experts.hidden, experts.intermediate);
        divide(memory, |pieces| Self {
            tokens: Packed::of(pieces, if group.is_some() { n_tokens } else { 0 }, hidden, group),
            first: Packed::of(pieces, n_pairs, hidden, group),
            second: Packed::of(pieces, n_pairs, intermediate, second_group),
        })
    }
}
