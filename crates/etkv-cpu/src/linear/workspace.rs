//! Memory for calls of products, which all calls of a program share.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::memory::Memory;

/// Memory for one call at a time. It grows to the size of the largest call, so only the first step of a shape
/// allocates.
#[derive(Debug, Default)]
pub struct Workspace {
    pub(super) memory: Option<Memory>,
}

/// The workspaces of a process, which the calls of all programs share. A call borrows one workspace. The
/// workspaces are freed with the last loaded call.
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
