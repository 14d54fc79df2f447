//! Divides memory into the pieces of a call. The memory is reused by later calls.

use std::marker::PhantomData;

use etkv_core::Result;

use super::Memory;

/// The layout of a call's memory.
pub(crate) trait Layout {
    /// The pieces that all threads use.
    type Shared;
    /// The pieces of one thread.
    type Scratch;

    fn shared(&self, pieces: &mut Pieces) -> Self::Shared;
    fn scratch(&self, pieces: &mut Pieces) -> Self::Scratch;
}

/// Returns the pieces that `take` takes. The block in `place` is replaced if it is too small. The contents of
/// pieces are arbitrary, but initialized.
///
/// # Errors
/// [`Backend`](etkv_core::Status::Backend) if memory is lacking.
pub(crate) fn divide<T>(place: &mut Option<Memory>, take: impl Fn(&mut Pieces) -> T) -> Result<T> {
    let size = size(&take);
    let start = Memory::at_least(place, size)?.as_ptr();
    Ok(take(&mut Pieces { start, used: 0 }))
}

/// The same as [`divide`] for the pieces of a layout, with a block for each of `threads` threads.
pub(crate) fn divide_for<L: Layout>(
    place: &mut Option<Memory>,
    layout: L,
    threads: usize,
) -> Result<(L::Shared, Blocks<'_, L>)> {
    let each = size(|pieces| layout.scratch(pieces));
    let (shared, start) =
        divide(place, |pieces| (layout.shared(pieces), pieces.take(&[threads, each])))?;
    Ok((shared, Blocks { start, each, threads, layout, lifetime: PhantomData }))
}

/// Returns the bytes of all pieces that `take` takes.
fn size<T>(take: impl Fn(&mut Pieces) -> T) -> usize {
    let mut pieces = Pieces { start: std::ptr::null_mut(), used: 0 };
    take(&mut pieces);
    pieces.used
}

/// A block of memory for each thread.
#[derive(Debug)]
pub(crate) struct Blocks<'a, L> {
    start: *mut u8,
    each: usize,
    threads: usize,
    layout: L,
    lifetime: PhantomData<&'a mut Memory>,
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
        debug_assert!(thread < self.threads);
        let start = self.start.wrapping_add(thread * self.each);
        self.layout.scratch(&mut Pieces { start, used: 0 })
    }
}

/// Divides a block of memory into consecutive pieces. If it begins at a null pointer, it only computes the
/// size.
pub(crate) struct Pieces {
    start: *mut u8,
    used: usize,
}

impl Pieces {
    /// Returns a piece whose number of elements is the product of `sizes`. It is aligned to a cache line.
    pub fn take<T>(&mut self, sizes: &[usize]) -> *mut T {
        let start = self.start.wrapping_add(self.used).cast();
        let bytes = sizes.iter().fold(size_of::<T>(), |bytes, &size| bytes.saturating_mul(size));
        // The allocation refuses a saturated size.
        self.used = self.used.saturating_add(bytes.saturating_add(63) & !63);
        start
    }
}
