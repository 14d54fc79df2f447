//! Views of rows as attention reads them.

use std::sync::Arc;

use etkv_core::KvFormat;

use crate::memory::Memory;

/// One plane of rows: elements or codes, scales, or offsets. The plane of one row of one KV head is
/// a run of bytes.
#[derive(Debug, Clone)]
pub struct Plane {
    pub(crate) memory: Arc<Memory>,
    /// Bytes from the start of the memory to the first slot of the view.
    pub(crate) offset: usize,
    /// Bytes from a slot to the next. The heads of a slot lie in between.
    pub(crate) slot_stride: usize,
    /// Bytes from a head to the next: the bytes of one row.
    pub(crate) head_stride: usize,
}

/// What a step reads of a layer's keys, or of its values: some slots, in the form in which they are
/// stored. Rows of a slot are side by side, head by head, so a thread that takes some slots reads
/// one run of memory.
///
/// The planes of each format are those of etkv's MLX storage, bit for bit:
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
    /// KV heads of each slot.
    pub(crate) n_kv_heads: usize,
    /// Elements of one row.
    pub(crate) head_dim: usize,
    /// The number of slots.
    pub(crate) n_slots: usize,
    /// As many planes as the format has; the others are absent.
    pub(crate) planes: [Option<Plane>; 3],
}
