//! Rows in float32, float16 or bfloat16, one buffer.

use mlx_rs::ops::{concatenate, zeros_dtype};
use mlx_rs::{Array, Dtype};

use super::Pool;
use crate::config::KvFormat;
use crate::error::{fail, Result};
use crate::mlx::{cast, slice_axis, update_axis};

/// The axis of the slots in `[1, n_kv_heads, slots, head_dim]`. Heads come
/// first, so that the rows of a head are one run of memory, as attention reads
/// them, and a prefix of the slots is a view.
const SLOTS: usize = 2;

/// Rows in a float dtype: one buffer `[1, n_kv_heads, slots, head_dim]`.
pub struct FloatPool {
    dtype: Dtype,
    row_bytes: usize,
    n_kv_heads: i32,
    head_dim: i32,
    /// The only handle on the buffer, so that writes happen in place.
    buffer: Option<Array>,
}

impl FloatPool {
    /// A pool without slots.
    pub fn new(format: KvFormat, n_kv_heads: i32, head_dim: i32) -> Self {
        let dtype = match format {
            KvFormat::F32 => Dtype::Float32,
            KvFormat::F16 => Dtype::Float16,
            KvFormat::Bf16 => Dtype::Bfloat16,
        };
        Self {
            dtype,
            row_bytes: format.row_bytes(head_dim as usize),
            n_kv_heads,
            head_dim,
            buffer: None,
        }
    }
}

impl Pool for FloatPool {
    fn slots(&self) -> i32 {
        self.buffer.as_ref().map_or(0, |buffer| buffer.dim(SLOTS as i32))
    }

    fn slot_bytes(&self) -> u64 {
        self.n_kv_heads as u64 * self.row_bytes as u64
    }

    fn grow(&mut self, slots: i32) -> Result<()> {
        let added = slots - self.slots();
        if added <= 0 {
            return Ok(());
        }
        let zeros = zeros_dtype(&[1, self.n_kv_heads, added, self.head_dim], self.dtype)?;
        let grown = match &self.buffer {
            None => zeros,
            Some(buffer) => concatenate(&[buffer, &zeros], SLOTS as i32)?,
        };
        // Now, while the old buffer is there: where memory runs out, it stays.
        grown.eval()?;
        self.buffer = Some(grown);
        Ok(())
    }

    fn write(&mut self, start: i32, rows: &Array) -> Result<()> {
        let Some(buffer) = &self.buffer else {
            fail!(Internal, "a pool without slots is written to");
        };
        let stop = start + rows.dim(SLOTS as i32);
        let rows = cast(rows, self.dtype)?;
        self.buffer = Some(update_axis(buffer, &rows, SLOTS, start, stop)?);
        Ok(())
    }

    fn read(&self, start: i32, stop: i32) -> Result<Array> {
        match &self.buffer {
            Some(buffer) => slice_axis(buffer, SLOTS, start, stop, 1),
            None => fail!(Internal, "a pool without slots is read"),
        }
    }

    fn buffers(&self) -> Vec<&Array> {
        self.buffer.iter().collect()
    }

    fn release(&mut self) {
        self.buffer = None;
    }
}
