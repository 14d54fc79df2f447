//! Memory for calls of experts, which the layers of a program share.

use etkv_core::Result;

use super::routing::Routing;
use super::sizes::Experts;
use crate::linear;
use crate::linear::blocks::Packed;
use crate::linear::WeightFormat;
use crate::memory::Memory;

/// Memory for one call at a time. It grows to the size of the largest call, so only the first step of a shape
/// allocates.
#[derive(Debug, Default)]
pub struct Workspace {
    memory: Option<Memory>,
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
    /// Returns the pieces of a call.
    ///
    /// # Errors
    /// [`Backend`](etkv_core::Status::Backend) if memory is lacking.
    pub(super) fn prepare(
        memory: &mut Option<Memory>,
        experts: &Experts,
        n_tokens: usize,
        n_pairs: usize,
    ) -> Result<Pieces> {
        // The first pass over the pieces, without a block, only computes the size.
        let (_, size) = pieces(std::ptr::null_mut(), experts, n_tokens, n_pairs);
        let start = Memory::at_least(memory, size)?.as_ptr();
        Ok(pieces(start, experts, n_tokens, n_pairs).0)
    }

    /// Returns its number of bytes.
    pub fn size(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.bytes().len())
    }

    /// Returns the parts of the workspace, so that they can be borrowed separately.
    pub(super) fn parts(&mut self) -> (&mut Option<Memory>, &mut Routing) {
        (&mut self.memory, &mut self.routing)
    }
}

/// Divides a block of memory into pieces. Returns them and the total size.
fn pieces(start: *mut u8, experts: &Experts, n_tokens: usize, n_pairs: usize) -> (Pieces, usize) {
    let [group, second_group] = experts.weights.map(WeightFormat::group);
    let (hidden, intermediate) = (experts.hidden, experts.intermediate);
    let mut parts = linear::Pieces::at(start);
    let pieces = Pieces {
        tokens: parts.take(if group.is_some() { n_tokens } else { 0 }, hidden, group),
        first: parts.take(n_pairs, hidden, group),
        second: parts.take(n_pairs, intermediate, second_group),
    };
    (pieces, parts.size())
}
