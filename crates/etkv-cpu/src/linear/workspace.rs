//! Memory for calls of products, which all calls of a program share.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::blocks::Packed;
use crate::memory::Memory;

/// Memory for one call at a time. It grows to the size of the largest call, so only the first step of a shape
/// allocates.
#[derive(Debug, Default)]
pub struct Workspace {
    pub(super) memory: Option<Memory>,
}

/// Divides a block of memory into pieces for inputs. Their contents are arbitrary, but initialized.
pub(crate) struct Pieces {
    start: *mut u8,
    used: usize,
}

impl Pieces {
    /// Begins at `start`. With a null pointer, the pieces only serve to compute the size.
    pub fn at(start: *mut u8) -> Self {
        Self { start, used: 0 }
    }

    /// Returns the bytes of all pieces so far.
    pub fn size(&self) -> usize {
        self.used
    }

    /// Returns a piece for the inputs of a product, `[rows, columns]`, as floats or as groups of integers.
    pub fn take(&mut self, rows: usize, columns: usize, group: Option<usize>) -> Packed {
        let mut piece = |size: usize| {
            let at = self.start.wrapping_add(self.used);
            // The allocation refuses a saturated size.
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

/// The workspaces of a process, which the calls of all programs share. A call borrows one. They are freed
/// with the last loaded call.
#[derive(Debug)]
pub struct Workspaces<W> {
    free: Mutex<Vec<W>>,
}

impl<W: Default> Workspaces<W> {
    /// Returns the workspaces in `place`, or creates them.
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
