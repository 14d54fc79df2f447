//! Memory of calls, which the layers of a program share.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use etkv_core::Result;

use super::blocks::Packed;
use super::routing::Routing;
use super::sizes::Experts;
use crate::memory::Memory;

/// Memory for one call at a time. It grows to the size that the largest call needs, so steps of one shape allocate
/// in the first only.
#[derive(Debug, Default)]
pub struct Workspace {
    memory: Option<Memory>,
    pub(super) routing: Routing,
}

/// The pieces of a call's memory. Their numbers are arbitrary, but initialized.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pieces {
    /// The tokens in 8 bits, `[T, hidden]`, with the scales and sums of their groups, `[T, groups]`.
    pub tokens: Packed,
    /// The inputs of the first products, of all pairs.
    pub first: Packed,
    /// The inputs of the second products, of all pairs.
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
        // Pieces of an empty block give its size.
        let (_, size) = pieces(std::ptr::null_mut(), experts, n_tokens, n_pairs);
        let start = Memory::at_least(memory, size)?.as_ptr();
        Ok(pieces(start, experts, n_tokens, n_pairs).0)
    }

    /// Returns its number of bytes.
    pub fn size(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.bytes().len())
    }

    /// Returns its parts, to borrow them separately.
    pub(super) fn parts(&mut self) -> (&mut Option<Memory>, &mut Routing) {
        (&mut self.memory, &mut self.routing)
    }
}

/// Returns the pieces of a block of memory, and its size.
fn pieces(start: *mut u8, experts: &Experts, n_tokens: usize, n_pairs: usize) -> (Pieces, usize) {
    let group = experts.weights.group();
    let mut used = 0usize;
    let mut take = |rows: usize, columns: usize, group: Option<usize>| {
        let mut piece = |size: usize| {
            let at = start.wrapping_add(used);
            // Saturated sizes are refused by the allocation.
            used = used.saturating_add(rows.saturating_mul(size).saturating_add(63) & !63);
            at
        };
        let groups = group.map_or(0, |group| columns / group);
        Packed {
            rows: piece(if group.is_some() { columns } else { 4 * columns }),
            scales: piece(4 * groups).cast(),
            sums: piece(4 * groups).cast(),
            columns,
            group: group.unwrap_or(0),
        }
    };
    let (hidden, intermediate) = (experts.hidden, experts.intermediate);
    let pieces = Pieces {
        tokens: take(if group.is_some() { n_tokens } else { 0 }, hidden, group),
        first: take(n_pairs, hidden, group),
        second: take(n_pairs, intermediate, group),
    };
    (pieces, used)
}

/// The workspaces of a process, for the calls of all programs. A call takes one and gives it back. They are freed
/// with the last call that may need one.
#[derive(Debug, Default)]
pub struct Workspaces {
    free: Mutex<Vec<Workspace>>,
}

impl Workspaces {
    /// Returns those of the process.
    pub fn shared() -> Arc<Self> {
        static SHARED: Mutex<Weak<Workspaces>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared.upgrade().unwrap_or_else(|| {
            let made = Arc::new(Self::default());
            *shared = Arc::downgrade(&made);
            made
        })
    }

    /// Calls `work` with a workspace that no other call uses.
    pub fn with<T>(&self, work: impl FnOnce(&mut Workspace) -> T) -> T {
        let free = || self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut workspace = free().pop().unwrap_or_default();
        let made = work(&mut workspace);
        free().push(workspace);
        made
    }
}
