//! The bytes of a pool's planes, for files. There slots come first, and the heads of a slot lie side by
//! side; in the buffers heads come first.

use std::borrow::Cow;

use mlx_rs::ops::indexing::take_axis;
use mlx_rs::transforms::eval;

use super::planes::{indices, update_list, Planes, SLOTS};
use crate::error::{fail, Result};
use crate::mlx::{self, slice_axis, update_axis};
use etkv_core::bookkeeping::Slots;

/// Exchanges the axes of the heads and of the slots.
const EXCHANGED: [i32; 4] = [0, 2, 1, 3];

impl Planes {
    /// Copies the rows of a plane to `bytes`. Waits for them.
    pub fn copy_out(&self, plane: usize, slots: &Slots, bytes: &mut [u8]) -> Result<()> {
        self.check_bytes(plane, slots, bytes.len())?;
        let buffer = &self.buffers[plane];
        let rows = match slots {
            Slots::Run(run) => slice_axis(buffer, SLOTS, run.start, run.end, 1)?,
            Slots::List(list) => take_axis(buffer, indices(list)?, SLOTS as i32)?,
        };
        let rows = rows.transpose_axes(&EXCHANGED)?.contiguous()?;
        eval([&rows])?;
        bytes.copy_from_slice(&mlx::bytes(&rows)?);
        Ok(())
    }

    /// Writes rows of a plane. Waits until they are written.
    pub fn copy_in(&mut self, plane: usize, slots: &Slots, bytes: &[u8]) -> Result<()> {
        self.check_bytes(plane, slots, bytes.len())?;
        let (width, dtype) = (self.layout[plane].width, self.layout[plane].dtype);
        let shape = [1, self.n_kv_heads, slots.len() as i32, width];
        let bytes = heads_first(bytes, self.n_kv_heads as usize, slots.len());
        // SAFETY: the bytes are as many as the shape and the dtype say.
        let mut rows = unsafe { mlx::host_array(&bytes, &shape, dtype)? };
        if slots.len() as i32 == self.slots() {
            // MLX takes rows for the whole buffer as the buffer.
            rows = mlx::on_device(&rows)?;
        }
        let buffer = &self.buffers[plane];
        let written = match slots {
            Slots::Run(run) => update_axis(buffer, &rows, SLOTS, run.start, run.end)?,
            Slots::List(list) => update_list(buffer, &rows, list)?,
        };
        // It holds the buffer alone, so the write is in place.
        self.buffers[plane] = written;
        Ok(eval([&self.buffers[plane]])?)
    }

    fn check_bytes(&self, plane: usize, slots: &Slots, found: usize) -> Result<()> {
        let expected = self.layout.get(plane).map(|plane| {
            let rows = slots.len() as u64 * u64::from(self.n_kv_heads.unsigned_abs());
            rows.saturating_mul(plane.row_bytes())
        });
        let fits = expected == Some(found as u64) && slots.end() <= self.slots();
        if !fits || slots.is_empty() || plane >= self.buffers.len() {
            fail!(
                Internal,
                "{found} bytes for plane {plane} of {} slots up to {} of {}",
                slots.len(),
                slots.end(),
                self.slots()
            );
        }
        Ok(())
    }
}

/// Returns the rows of slots, whose heads lie side by side, head by head. MLX's CPU build takes five times
/// as long to exchange the axes.
fn heads_first(bytes: &[u8], heads: usize, slots: usize) -> Cow<'_, [u8]> {
    if heads <= 1 {
        return Cow::Borrowed(bytes);
    }
    let row = bytes.len() / (heads * slots).max(1);
    let mut all = Vec::with_capacity(bytes.len());
    for head in 0..heads {
        for slot in 0..slots {
            all.extend_from_slice(&bytes[(slot * heads + head) * row..][..row]);
        }
    }
    Cow::Owned(all)
}

#[cfg(test)]
mod tests {
    use super::heads_first;
    use crate::store::codec_for;

    #[test]
    fn rows_of_a_head_come_together() {
        // Three slots of two heads, of two bytes each.
        let bytes = [1, 2, 10, 20, 3, 4, 30, 40, 5, 6, 50, 60];
        assert_eq!(*heads_first(&bytes, 2, 3), [1, 2, 3, 4, 5, 6, 10, 20, 30, 40, 50, 60]);
        assert_eq!(*heads_first(&bytes, 1, 6), bytes);
    }

    /// The planes of a format are those that files have.
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
