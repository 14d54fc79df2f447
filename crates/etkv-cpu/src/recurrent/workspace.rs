//! Memory for the steps of recurrent layers, which is reused between calls.

use crate::memory::Memory;

/// Memory for calls of [`scan`](super::scan) and [`convolve`](super::convolve). It grows to the size of the
/// largest call, so only the first step of a shape allocates. Each calling thread needs a separate workspace.
#[derive(Debug, Default)]
pub struct Workspace {
    pub(super) memory: Option<Memory>,
    /// The indices of a step's anchors. The vector is kept to reuse its memory.
    pub(super) places: Vec<Option<u32>>,
}

impl Workspace {
    /// Returns a workspace without memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns its number of bytes.
    pub fn size(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.bytes().len())
    }
}
