//! The bytes of a buffer's planes, for files. The layout is the same in memory and in a file.

use etkv_core::bookkeeping::Slots;
use etkv_core::error::fail;
use etkv_core::Result;

use super::buffer::{for_each_run, Buffer};
use crate::memory::unshared;

impl Buffer {
    /// Copies the rows of a plane to `bytes`.
    ///
    /// # Errors
    /// [`Internal`](etkv_core::Status::Internal) for slots or a plane that do not exist.
    pub fn copy_out(&self, plane: usize, slots: &Slots, bytes: &mut [u8]) -> Result<()> {
        self.check_bytes(plane, slots, bytes.len())?;
        if let Some(Some(memory)) = self.planes.get(plane) {
            for_each_run(slots, self.slot_bytes(plane), |there, here| {
                bytes[here].copy_from_slice(&memory.bytes()[there]);
            });
        }
        Ok(())
    }

    /// Writes rows of a plane.
    ///
    /// # Errors
    /// The errors of [`copy_out`](Self::copy_out), and [`Backend`](etkv_core::Status::Backend) if a view uses
    /// the buffer and memory for a copy is lacking.
    pub fn copy_in(&mut self, plane: usize, slots: &Slots, bytes: &[u8]) -> Result<()> {
        self.check_bytes(plane, slots, bytes.len())?;
        self.own(slots);
        let slot_bytes = self.slot_bytes(plane);
        if let Some(Some(memory)) = self.planes.get_mut(plane) {
            let memory = unshared(memory)?;
            for_each_run(slots, slot_bytes, |there, here| {
                memory[there].copy_from_slice(&bytes[here]);
            });
        }
        Ok(())
    }

    fn check_bytes(&self, plane: usize, slots: &Slots, found: usize) -> Result<()> {
        self.check(slots)?;
        let has = plane < self.planes.len() && self.has_plane(plane);
        let expected = if has { slots.len().saturating_mul(self.slot_bytes(plane)) } else { 0 };
        if !has || found != expected {
            fail!(Internal, "{found} bytes for plane {plane} of {} slots", slots.len());
        }
        Ok(())
    }
}
