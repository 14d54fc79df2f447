//! The bytes of a pool's planes, for files. In a file the slots are the outer axis, and in the buffers the heads are.

use mlx_rs::transforms::eval;

use super::planes::with_rows;
use super::Pool;
use crate::error::{fail, Result};
use crate::mlx;
use etkv_core::bookkeeping::Slots;

/// Exchanges the axes of the heads and of the slots.
const EXCHANGED: [i32; 4] = [0, 2, 1, 3];

impl Pool {
    /// Copies the rows of a plane to `bytes`: slot by slot, with the heads of a slot next to each other. Waits until
    /// they are computed.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    pub(super) fn copy_out(&self, plane: usize, slots: &Slots, bytes: &mut [u8]) -> Result<()> {
        self.check_bytes(plane, slots, bytes.len())?;
        let rows = self.taken(plane, slots)?;
        let rows = rows.transpose_axes(&EXCHANGED)?.contiguous()?;
        eval([&rows])?;
        mlx::copy_to(&rows, bytes)
    }

    /// Writes bytes that [`copy_out`](Self::copy_out) copied. Waits until they are written.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    pub(super) fn copy_in(&mut self, plane: usize, slots: &Slots, bytes: &[u8]) -> Result<()> {
        self.check_bytes(plane, slots, bytes.len())?;
        let (width, dtype) = (self.layout[plane].width, self.layout[plane].dtype);
        let shape = [1, slots.len() as i32, self.n_kv_heads, width];
        // SAFETY: the number of bytes matches the shape and the dtype.
        let rows = unsafe { mlx::host_array(bytes, &shape, dtype)? };
        let rows = rows.transpose_axes(&EXCHANGED)?;
        let slots = self.for_writing(slots)?;
        let written = with_rows(&self.buffers[plane], &rows, &slots)?;
        // The buffer has no other owner, so the write was in place.
        self.buffers[plane] = written;
        Ok(eval([&self.buffers[plane]])?)
    }

    fn check_bytes(&self, plane: usize, slots: &Slots, found: usize) -> Result<()> {
        let expected = self.layout.get(plane).map(|plane| {
            let rows = slots.len() as u64 * u64::from(self.n_kv_heads.unsigned_abs());
            rows.saturating_mul(plane.row_bytes())
        });
        let fits = expected == Some(found as u64) && slots.end() <= self.slots();
        if !fits || slots.is_empty() || plane >= self.layout.len() {
            fail!(
                Internal,
                "cannot copy {found} bytes for plane {plane} of {} slots, up to slot {} of {}",
                slots.len(),
                slots.end(),
                self.slots()
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::store::codec_for;

    /// The planes of a format are the planes of its files.
    #[test]
    fn planes_lie_as_files_say() {
        for name in
            ["f32", "f16", "bf16", "affine3g32", "affine8g64", "mxfp8", "mxfp4", "nvfp4", "row-fp4"]
        {
            let format: crate::KvFormat = name.parse().unwrap();
            let layout = codec_for(format, 64).unwrap().layout();
            let bytes: Vec<u64> = layout.iter().map(|plane| plane.row_bytes()).collect();
            let planes = format.planes(64);
            let expected: Vec<u64> = planes.iter().map(|plane| plane.row_bytes() as u64).collect();
            assert_eq!(bytes, expected, "{name}");
        }
    }
}
