//! Converts the state of one growing sequence to that of a file, and back.

use super::{ContiguousBookkeeping, LayerGroup};
use crate::bookkeeping::Slots;
use crate::error::{fail, Result};
use crate::snapshot::{damaged, ContiguousState};

impl ContiguousBookkeeping {
    /// Returns the state. There must be no uncommitted plan.
    pub fn state(&self) -> ContiguousState {
        let dropped = self.groups.iter().map(|group| group.dropped).collect();
        ContiguousState { length: self.length, dropped }
    }

    /// Returns bookkeeping with this state, and with the same capacity and layer groups as `self`.
    ///
    /// # Errors
    /// [`File`](crate::Status::File) for a state that no steps produce, or that does not fit.
    pub fn with_state(&self, state: &ContiguousState) -> Result<Self> {
        let (length, capacity) = (state.length, self.capacity);
        if length < 0 {
            return Err(damaged(format_args!("its length is {length}")));
        }
        if length > capacity {
            fail!(
                File,
                "the file has {length} positions, but the capacity of this cache is {capacity}"
            );
        }
        let [found, expected] = [state.dropped.len(), self.groups.len()];
        if found != expected {
            return Err(damaged(format_args!("it has {found} layer groups, expected {expected}")));
        }
        let groups = self.groups.iter().zip(&state.dropped);
        let groups = groups.map(|(group, &dropped)| group.with_dropped(dropped, length));
        Ok(Self {
            capacity,
            length,
            groups: groups.collect::<Result<_>>()?,
            changes: self.changes + 1,
        })
    }

    /// Returns the number of layer groups.
    pub fn n_groups(&self) -> usize {
        self.groups.len()
    }

    /// Returns the slots of a layer group that have rows.
    ///
    /// # Panics
    /// If the layer group does not exist.
    pub fn held(&self, group: usize) -> Slots {
        Slots::Run(0..self.length - self.groups[group].dropped)
    }
}

impl LayerGroup {
    fn with_dropped(&self, dropped: i32, length: i32) -> Result<Self> {
        let possible = match self.window {
            _ if dropped < 0 => false,
            None => dropped == 0,
            Some(window) => {
                let held = window.sinks().saturating_add(dropped);
                let seen =
                    dropped == 0 || (window.slides() && window.rewindable_to(held) <= length);
                seen && !window.is_full(length - dropped)
            }
        };
        if !possible {
            return Err(damaged(format_args!(
                "a layer group has dropped {dropped} of {length} positions"
            )));
        }
        Ok(Self { window: self.window, dropped })
    }
}
