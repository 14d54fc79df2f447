//! Blocks of memory that a store and its views share.

mod pages;
pub(crate) mod pieces;

use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::ptr::NonNull;
use std::sync::Arc;

use etkv_core::{Error, Result, Status};

use pages::Mapping;
pub(crate) use pages::{page, Piece, SHARES};

/// A block of bytes, aligned to a cache line. The store writes to it only while no view uses it.
#[derive(Debug)]
pub(crate) struct Memory {
    block: Block,
    start: NonNull<u8>,
    size: usize,
}

/// The kind of memory.
#[derive(Debug)]
enum Block {
    /// Memory of the allocator.
    Own(NonNull<u8>, Layout),
    /// Mapped pages. The first pages may be shared with other blocks.
    Mapped(Mapping),
}

// SAFETY: a block owns its bytes, and gives access to them through references to the block only.
unsafe impl Send for Memory {}
// SAFETY: the same as above.
unsafe impl Sync for Memory {}

impl Memory {
    const LINE: usize = 64;

    /// The alignment that is requested from the allocator. With a larger alignment, the allocator would write
    /// zeros. With this alignment, large blocks are fresh pages, which the system has zeroed.
    const ALIGN: usize = 16;

    /// Returns `size` bytes of zeros.
    ///
    /// # Errors
    /// [`Backend`](Status::Backend) if memory is lacking.
    pub fn zeroed(size: usize) -> Result<Self> {
        let lacking = || {
            Error::new(
                Status::Backend,
                format_args!(
                    "out of memory: {size} bytes for a cache; free memory or lower the capacity"
                ),
            )
        };
        #[cfg(test)]
        if shortage::is_now() {
            return Err(lacking());
        }
        let layout = size
            .checked_add(Self::LINE)
            .and_then(|padded| Layout::from_size_align(padded, Self::ALIGN).ok())
            .ok_or_else(lacking)?;
        // SAFETY: the size of the layout is not 0.
        let block = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(lacking)?;
        let skipped = block.as_ptr().align_offset(Self::LINE).min(Self::LINE);
        // SAFETY: the block is one cache line longer than `size`.
        let start = unsafe { block.add(skipped) };
        Ok(Self { block: Block::Own(block, layout), start, size })
    }

    /// Returns `size` bytes that begin with frozen bytes. They can grow to `most` bytes without a copy.
    ///
    /// # Errors
    /// [`Backend`](Status::Backend) if memory is lacking.
    pub fn mapped(pieces: Vec<Piece>, size: usize, most: usize) -> Result<Self> {
        let mapping = Mapping::new(pieces, most.max(size))?;
        Ok(Self { start: mapping.start(), block: Block::Mapped(mapping), size })
    }

    /// Returns the frozen bytes at the beginning, or `None` for allocated memory.
    pub fn pieces(&self) -> Option<&[Piece]> {
        match &self.block {
            Block::Own(..) => None,
            Block::Mapped(mapping) => Some(mapping.pieces()),
        }
    }

    /// Returns whether the block can grow to `size` bytes in place.
    pub fn has_room(&self, size: usize) -> bool {
        match &self.block {
            Block::Own(..) => size <= self.size,
            Block::Mapped(mapping) => size <= mapping.size(),
        }
    }

    /// Grows to `size` bytes in place, if there is room. New bytes are zero. Never shrinks.
    pub fn extend(&mut self, size: usize) {
        if self.has_room(size) {
            self.size = self.size.max(size);
        }
    }

    /// Returns the block in `place` if it has at least `size` bytes. Otherwise frees it, and replaces it by a
    /// new zeroed block.
    ///
    /// # Errors
    /// [`Backend`](Status::Backend) if memory is lacking. `place` is then empty.
    pub fn at_least(place: &mut Option<Self>, size: usize) -> Result<&mut Self> {
        let block = match place.take() {
            Some(block) if block.size >= size => block,
            old => {
                drop(old);
                Self::zeroed(size)?
            }
        };
        Ok(place.insert(block))
    }

    /// Returns a copy of `size` bytes, with zeros after the bytes of this block.
    ///
    /// # Errors
    /// [`Backend`](Status::Backend) if memory is lacking.
    pub fn copied(&self, size: usize) -> Result<Self> {
        let mut copy = Self::zeroed(size)?;
        let n = size.min(self.size);
        copy.bytes_mut()[..n].copy_from_slice(&self.bytes()[..n]);
        Ok(copy)
    }

    /// Returns the address of the first byte. Only the single owner may write through it, while there is no
    /// reference to the bytes.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: there are `size` bytes, which are zeroed at first. They are not written while they are
        // borrowed.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.size) }
    }

    /// Returns the bytes for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the same as above, and this reference is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.size) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Block::Own(block, layout) = self.block {
            // SAFETY: the block was allocated with this layout.
            unsafe { dealloc(block.as_ptr(), layout) };
        }
    }
}

/// Returns the bytes for writing. If a view uses them, they are copied first, and the view keeps the old
/// ones.
///
/// # Errors
/// [`Backend`](Status::Backend) if memory for the copy is lacking.
pub(crate) fn unshared(memory: &mut Arc<Memory>) -> Result<&mut [u8]> {
    if Arc::get_mut(memory).is_none() {
        *memory = Arc::new(memory.copied(memory.size)?);
    }
    match Arc::get_mut(memory) {
        Some(own) => Ok(own.bytes_mut()),
        None => Err(Error::new(Status::Internal, "a fresh copy is shared")),
    }
}

/// Failures of this thread's allocations, for tests.
#[cfg(test)]
pub(crate) mod shortage {
    use std::cell::Cell;

    thread_local! {
        static AFTER: Cell<Option<usize>> = const { Cell::new(None) };
    }

    /// Makes all allocations fail after `n` more. With `None`, no allocation fails.
    pub fn after(n: Option<usize>) {
        AFTER.set(n);
    }

    pub(super) fn is_now() -> bool {
        let left = AFTER.get();
        AFTER.set(left.map(|n| n.saturating_sub(1)));
        left == Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::refused::refused;

    #[test]
    fn blocks_are_zeros_at_a_cache_line() {
        for size in [0, 1, 63, 64, 65, 4096, 1 << 20] {
            let mut memory = Memory::zeroed(size).unwrap();
            assert_eq!(memory.as_ptr().align_offset(64), 0);
            assert_eq!(memory.bytes(), vec![0; size]);
            memory.bytes_mut().fill(7);
            let longer = memory.copied(size + 3).unwrap();
            assert_eq!(longer.bytes()[..size], *memory.bytes());
            assert_eq!(longer.bytes()[size..], [0; 3]);
        }
    }

    /// Mappings of the same bytes do not see each other's writes.
    #[test]
    fn mappings_share_what_none_of_them_wrote() {
        let page = page();
        let bytes: Vec<u8> = (0..3 * page + 7).map(|n| (n % 251) as u8).collect();
        Piece::freeze(&[1; 5], 0).unwrap();
        let piece = Piece::freeze(&bytes, 0).unwrap();
        let map = || Memory::mapped(vec![piece.clone()], bytes.len(), 8 * page).unwrap();
        let (mut a, mut b) = (map(), map());
        assert_eq!(a.bytes(), bytes);
        assert!(a.has_room(8 * page) && !a.has_room(8 * page + 1));
        a.extend(4 * page + 1);
        assert_eq!(a.bytes()[..bytes.len()], bytes);
        assert!(a.bytes()[bytes.len()..].iter().all(|&byte| byte == 0));
        a.bytes_mut()[page] = 255;
        a.bytes_mut()[4 * page] = 9;
        b.bytes_mut()[0] = 77;
        assert_eq!((a.bytes()[0], a.bytes()[page], a.bytes()[4 * page]), (0, 255, 9));
        assert_eq!((b.bytes()[0], b.bytes()[page]), (77, bytes[page]));
        drop(a);
        // A block that begins with a part of the frozen bytes, and continues with other bytes.
        let next = Piece::freeze(&[5; 10], 2 * page).unwrap();
        let joined = vec![piece.up_to(2 * page).unwrap(), next];
        drop(piece);
        drop(b);
        let joined = Memory::mapped(joined, 2 * page + 10, 0).unwrap();
        assert_eq!(joined.bytes()[..2 * page], bytes[..2 * page]);
        assert_eq!(joined.bytes()[2 * page..], [5; 10]);
        assert_eq!(joined.pieces().unwrap().len(), 2);
        let copy = joined.copied(2 * page).unwrap();
        assert!(copy.pieces().is_none());
        assert_eq!(copy.bytes(), &joined.bytes()[..2 * page]);
    }

    #[test]
    fn sizes_that_no_machine_has_are_refused() {
        for size in [usize::MAX, isize::MAX as usize, 1 << 60] {
            refused(Memory::zeroed(size), Status::Backend, &format!("{size} bytes"));
        }
    }

    #[test]
    fn a_holder_keeps_what_it_read() {
        let mut own = Arc::new(Memory::zeroed(8).unwrap());
        unshared(&mut own).unwrap()[0] = 1;
        let place = own.as_ptr();
        let held = own.clone();
        unshared(&mut own).unwrap()[0] = 2;
        assert_eq!((held.bytes()[0], own.bytes()[0]), (1, 2));
        assert_eq!(held.as_ptr(), place);
        let place = own.as_ptr();
        unshared(&mut own).unwrap()[0] = 3;
        assert_eq!(own.as_ptr(), place, "alone, it is written in place");
    }
}
