//! Memory of calls, which the calls of a program share.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::blocks::Packed;
use crate::memory::Memory;

/// Memory for one call of a product at a time. It grows to the size that the largest call needs, so steps of one
/// shape allocate in the first only.
#[derive(Debug, Default)]
pub struct Workspace {
    pub(super) memory: Option<Memory>,
}

/// Divides a block of memory into pieces for inputs. Their numbers are arbitrary, but initialized.
pub(crate) struct Pieces {
    start: *mut u8,
    used: usize,
}

impl Pieces {
    /// Begins at `start`. Pieces at a null pointer give the size alone.
    pub fn at(start: *mut u8) -> Self {
        Self { start, used: 0 }
    }

    /// Returns the bytes that were taken.
    pub fn size(&self) -> usize {
        self.used
    }

    /// Takes a piece for the inputs of a product, `[rows, columns]`, in floats or in groups of integers.
    pub fn take(&mut self, rows: usize, columns: usize, group: Option<usize>) -> Packed {
        let mut piece = |size: usize| {
            let at = self.start.wrapping_add(self.used);
            // Saturated sizes are refused by the allocation.
            let size = rows.saturating_mul(size).saturating_add(63) & !63;
            self.used = self.used.saturating_add(size);
            at
        };
        let groups = group.map_or(0, |group| columns / group);
        Packed {
            rows: piece(if group.is_some() { columns } else { 4 * columns }),
            scales: piece(4 * groups).cast(),
            starts: piece(4 * groups).cast(),
            columns,
            group: group.unwrap_or(0),
        }
    }
}

/// The workspaces of a process, for the calls of all programs. A call takes one and gives it back. They are freed
/// with the last call that may need one.
#[derive(Debug)]
pub struct Workspaces<W> {
    free: Mutex<Vec<W>>,
}

impl<W: Default> Workspaces<W> {
    /// Returns those of `place`, which are made if it has none.
    pub fn shared(place: &Mutex<Weak<Self>>) -> Arc<Self> {
        let mut shared = place.lock().unwrap_or_else(PoisonError::into_inner);
        shared.upgrade().unwrap_or_else(|| {
            let made = Arc::new(Self { free: Mutex::default() });
            *shared = Arc::downgrade(&made);
            made
        })
    }

    /// Calls `work` with a workspace that no other call uses.
    pub fn with<T>(&self, work: impl FnOnce(&mut W) -> T) -> T {
        let free = || self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut workspace = free().pop().unwrap_or_default();
        let made = work(&mut workspace);
        free().push(workspace);
        made
    }
}
