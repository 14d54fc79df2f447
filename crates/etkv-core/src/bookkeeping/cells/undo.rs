//! Undoes a step after its commit.

use super::segments::Segments;
use super::CellsBookkeeping;
use crate::bookkeeping::Slots;
use crate::error::{fail, Result};

/// The positions that a committed step added, and their cells.
#[derive(Debug, Clone)]
pub struct AddedStep {
    segments: Segments,
    positions: Vec<i32>,
    cells: Slots,
}

impl AddedStep {
    /// Returns the cells of the layer group of full history.
    pub fn cells(&self) -> &Slots {
        &self.cells
    }
}

impl CellsBookkeeping {
    /// Returns whether the open step only adds positions. Its commit then neither moves nor drops rows, so
    /// [`undo`](Self::undo) can restore the state before the step.
    pub fn only_adds(&self) -> bool {
        self.step.is_some()
            && self.groups.len() == 1
            && self.recurrent.is_none()
            && self.trees.is_empty()
    }

    /// Commits the open step, which must [only add](Self::only_adds) positions. Returns the argument of
    /// [`undo`](Self::undo).
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) if no step is open.
    pub fn commit_added(&mut self) -> Result<AddedStep> {
        let (Some(step), Some(plan)) = (&self.step, self.plans.first()) else {
            fail!(Step, "no step is open on this cache");
        };
        let added = AddedStep {
            segments: step.segments.clone(),
            positions: self.positions.clone(),
            cells: plan.write.clone(),
        };
        self.commit()?;
        Ok(added)
    }

    /// Removes the positions that the last committed step added. The sequences are then as before the step, but its
    /// declaration is not restored.
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) while a step is open.
    pub fn undo(&mut self, added: &AddedStep) -> Result<()> {
        self.refuse_in_step("undo the last")?;
        let mut positions = added.positions.iter();
        for (members, n_tokens) in added.segments.iter() {
            for &position in positions.by_ref().take(n_tokens) {
                for &member in members {
                    for group in &mut self.groups {
                        group.remove(member, &(position..position + 1));
                    }
                }
            }
        }
        Ok(())
    }
}
