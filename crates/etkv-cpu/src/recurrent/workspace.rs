//! Memory for the steps of recurrent layers, kept from call to call.

use std::marker::PhantomData;

use etkv_core::Result;

use crate::memory::Memory;

/// Memory for calls of [`scan`](super::scan) and [`convolve`](super::convolve). It grows to the size that the
/// largest call needs, so steps of one shape allocate in the first only. Each calling thread needs its own.
#[derive(Debug, Default)]
pub struct Workspace {
    memory: Option<Memory>,
    /// Where the anchors of a step lie, kept for its memory.
    pub(super) places: Vec<Option<u32>>,
}

/// What a call keeps in a workspace.
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

    /// Returns the pieces of a call. Their numbers are arbitrary, but initialized.
    ///
    /// # Errors
    /// [`Backend`](etkv_core::Status::Backend) if memory is lacking.
    pub(super) fn prepare<L: Layout>(
        memory: &mut Option<Memory>,
        layout: L,
        threads: usize,
    ) -> Result<(L::Shared, Blocks<'_, L>)> {
        // Pieces of an empty block give its size.
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

    /// Returns its parts, to borrow them separately.
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

// SAFETY: it hands out memory under the conditions of `scratch`.
unsafe impl<L: Sync> Sync for Blocks<'_, L> {}

impl<L: Layout> Blocks<'_, L> {
    /// Returns the pieces of thread `thread`.
    ///
    /// # Safety
    /// There are more than `thread` threads. Earlier pieces of the same thread are no longer used, and these
    /// only while the blocks live.
    pub unsafe fn scratch(&self, thread: usize) -> L::Scratch {
        self.layout.scratch(&mut Pieces::at(self.start.wrapping_add(thread * self.each)))
    }
}

/// Hands out pieces of a block of memory, one after another.
pub(super) struct Pieces {
    start: *mut u8,
    used: usize,
}

impl Pieces {
    fn at(start: *mut u8) -> Self {
        Self { start, used: 0 }
    }

    /// Returns room for the product of `sizes` numbers, aligned to a cache line.
    pub fn take(&mut self, sizes: &[usize]) -> *mut f32 {
        let start = self.start.wrapping_add(self.used).cast();
        let bytes = sizes.iter().fold(4usize, |bytes, &size| bytes.saturating_mul(size));
        // Saturated sizes are refused by the allocation.
        self.used = self.used.saturating_add(bytes.saturating_add(63) & !63);
        start
    }
}
