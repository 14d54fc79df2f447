//! Memory for the steps of recurrent layers, which is reused between calls.

use std::marker::PhantomData;

use etkv_core::Result;

use crate::memory::Memory;

/// Memory for calls of [`scan`](super::scan) and [`convolve`](super::convolve). It grows to the size of the
/// largest call, so only the first step of a shape allocates. Each calling thread needs a separate workspace.
#[derive(Debug, Default)]
pub struct Workspace {
    memory: Option<Memory>,
    /// The indices of a step's anchors. The vector is kept to reuse its memory.
    pub(super) places: Vec<Option<u32>>,
}

/// The layout of a call's memory in a workspace.
pub(super) trait Layout: Copy + Sync {
    /// The pieces that all threads use.
    type Shared;
    /// The pieces of one thread.
    type Scratch;

    fn shared(&self, pieces: &mut Pieces) -> Self::Shared;
    fn scratch(&self, pieces: &mut Pieces) -> Self::Scratch;
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

    /// Returns the pieces of a call. Their contents are arbitrary, but initialized.
    ///
    /// # Errors
    /// [`Backend`](etkv_core::Status::Backend) if memory is lacking.
    pub(super) fn prepare<L: Layout>(
        memory: &mut Option<Memory>,
        layout: L,
        threads: usize,
    ) -> Result<(L::Shared, Blocks<'_, L>)> {
        // The first pass over the pieces, without a block, only computes the size.
        let mut pieces = Pieces::at(std::ptr::null_mut());
        layout.shared(&mut pieces);
        let shared = pieces.used;
        let mut pieces = Pieces::at(std::ptr::null_mut());
        layout.scratch(&mut pieces);
        let each = pieces.used;
        let size = shared.saturating_add(each.saturating_mul(threads));
        let start = Memory::at_least(memory, size)?.as_ptr();
        let blocks =
            Blocks { start: start.wrapping_add(shared), each, layout, lifetime: PhantomData };
        Ok((layout.shared(&mut Pieces::at(start)), blocks))
    }

    /// Returns the parts of the workspace, so that they can be borrowed separately.
    pub(super) fn parts(&mut self) -> (&mut Option<Memory>, &mut Vec<Option<u32>>) {
        (&mut self.memory, &mut self.places)
    }
}

/// A block of memory for each thread.
#[derive(Debug)]
pub(super) struct Blocks<'a, L> {
    start: *mut u8,
    each: usize,
    layout: L,
    lifetime: PhantomData<&'a mut Workspace>,
}

// SAFETY: `scratch` documents the conditions for the memory that it returns.
unsafe impl<L: Sync> Sync for Blocks<'_, L> {}

impl<L: Layout> Blocks<'_, L> {
    /// Returns the pieces of thread `thread`.
    ///
    /// # Safety
    /// `thread` must be below the number of threads. Earlier pieces of the same thread must not be used any
    /// more. The pieces must not be used after the blocks are dropped.
    pub unsafe fn scratch(&self, thread: usize) -> L::Scratch {
        self.layout.scratch(&mut Pieces::at(self.start.wrapping_add(thread * self.each)))
    }
}

/// Divides a block of memory into consecutive pieces.
pub(super) struct Pieces {
    start: *mut u8,
    used: usize,
}

impl Pieces {
    fn at(start: *mut u8) -> Self {
        Self { start, used: 0 }
    }

    /// Returns a piece whose size is the product of `sizes`, in numbers. It is aligned to a cache line.
    pub fn take(&mut self, sizes: &[usize]) -> *mut f32 {
        let start = self.start.wrapping_add(self.used).cast();
        let bytes = sizes.iter().fold(4usize, |bytes, &size| bytes.saturating_mul(size));
        // The allocation refuses a saturated size.
        self.used = self.used.saturating_add(bytes.saturating_add(63) & !63);
        start
    }
}
