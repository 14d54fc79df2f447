//! Views of stored rows, for attention.

use std::sync::Arc;

use etkv_core::error::fail;
use etkv_core::{KvFormat, Result};

use crate::memory::Memory;
use crate::store::Codec;

/// A plane of rows: elements or codes, scales, or offsets. In a plane, a row of a KV head is a run of bytes.
#[derive(Debug, Clone)]
pub struct Plane {
    pub(crate) memory: Arc<Memory>,
    /// The bytes from the start of the memory to the first slot of the view.
    pub(crate) offset: usize,
    /// The bytes from a slot to the next one. The heads of a slot are between them.
    pub(crate) slot_stride: usize,
    /// The bytes from a head to the next one, which are those of one row.
    pub(crate) head_stride: usize,
}

/// The slots of a layer's keys or values that a step reads, in their storage format. The rows of a slot are
/// contiguous, head by head, so a thread that processes adjacent slots reads one run of memory.
///
/// A view never changes, but shares the memory of the store. If the store writes to a layer while there is a
/// view of it, the store first copies the layer's keys or values. Drop views before the next step to avoid
/// this.
///
/// The planes of each format have the same bits as in etkv's MLX storage:
///
/// | format | planes |
/// | --- | --- |
/// | `f32`, `f16`, `bf16` | elements |
/// | `affine<b>g<g>` | codes, `head_dim * b / 8` bytes, the first element in the lowest bits; a float16 scale for each group; a float16 offset for each group. An element is `code * scale + offset` |
/// | `mxfp8`, `mxfp4` | E4M3 or E2M1 codes; one E8M0 scale for 32 elements |
/// | `nvfp4` | E2M1 codes; one E4M3 scale for 16 elements |
/// | `row-int4`, `row-fp4` | 4-bit codes, eight in a word with the first lowest (integers with 8 added, or E2M1); one float16 scale |
#[derive(Debug, Clone)]
pub struct View {
    /// The format of the rows.
    pub(crate) format: KvFormat,
    /// The number of KV heads of each slot.
    pub(crate) n_kv_heads: usize,
    /// The elements of a row.
    pub(crate) head_dim: usize,
    /// The elements of a stored row. The view has the first `head_dim` of them.
    pub(crate) stored_dim: usize,
    /// The number of slots.
    pub(crate) n_slots: usize,
    /// The planes of the format. The others are absent.
    pub(crate) planes: [Option<Plane>; 3],
}

impl Plane {
    /// Returns the bytes of one row.
    fn row(&self, slot: usize, head: usize) -> &[u8] {
        let start = self.offset + slot * self.slot_stride + head * self.head_stride;
        &self.memory.bytes()[start..start + self.head_stride]
    }
}

impl View {
    /// Returns the format of the rows.
    pub fn format(&self) -> KvFormat {
        self.format
    }

    /// Returns the number of slots.
    pub fn len(&self) -> usize {
        self.n_slots
    }

    /// Returns whether there are no slots.
    pub fn is_empty(&self) -> bool {
        self.n_slots == 0
    }

    /// Returns the number of KV heads.
    pub fn n_kv_heads(&self) -> usize {
        self.n_kv_heads
    }

    /// Returns the number of elements of one row.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Returns a view of the first `elements` of each row, or of all if there are fewer. Both views share
    /// memory.
    #[doc(hidden)]
    pub fn first(&self, elements: usize) -> Self {
        Self { head_dim: elements.min(self.head_dim), ..self.clone() }
    }

    /// Returns the bytes of a row in a plane, or `None` if the view lacks the plane, the slot or the head.
    pub fn row(&self, plane: usize, slot: usize, head: usize) -> Option<&[u8]> {
        let exists = slot < self.n_slots && head < self.n_kv_heads;
        let plane = self.planes.get(plane)?.as_ref();
        Some(plane.filter(|_| exists)?.row(slot, head))
    }

    /// Returns all rows in float32, `[n_kv_heads, len, head_dim]`.
    ///
    /// # Errors
    /// [`Backend`](etkv_core::Status::Backend) if there is too little memory.
    pub fn dequantized(&self) -> Result<Vec<f32>> {
        let codec = Codec::of(self.format);
        let (mut rows, n) = (Vec::new(), self.n_kv_heads * self.n_slots * self.head_dim);
        if rows.try_reserve_exact(n).is_err() {
            fail!(Backend, "out of memory: {n} elements of rows; free memory");
        }
        rows.resize(n, 0.0);
        // Codecs decode whole groups, and the view may end within a group.
        let mut stored = vec![0.0; self.stored_dim];
        for (at, row) in rows.chunks_exact_mut(self.head_dim.max(1)).enumerate() {
            let (head, slot) = (at / self.n_slots, at % self.n_slots);
            let plane = |at: usize| self.row(at, slot, head).unwrap_or_default();
            codec.decode([plane(0), plane(1), plane(2)], &mut stored);
            row.copy_from_slice(&stored[..self.head_dim]);
        }
        Ok(rows)
    }
}
