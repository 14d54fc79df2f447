//! Memory that begins with bytes that caches share. Kernels use it like any other memory: when a shared page
//! is written, the system first copies the page for the writer.

#[cfg(not(target_os = "linux"))]
#[path = "pages/copies.rs"]
mod frozen;
#[cfg(target_os = "linux")]
#[path = "pages/file.rs"]
mod frozen;

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use etkv_core::{Error, Result, Status};
use rustix::io::Errno;
use rustix::mm::{mmap_anonymous, munmap, MapFlags, ProtFlags};

use frozen::FrozenPages;
pub(crate) use frozen::SHARES;

const ACCESS: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// A run of frozen bytes and its place in a mapping. Both consist of whole pages.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    frozen: Arc<FrozenPages>,
    place: Range<usize>,
}

impl Piece {
    /// Copies bytes to a piece for the offset `place` of a mapping, which is a page boundary.
    ///
    /// # Errors
    /// [`Backend`](Status::Backend) if memory is lacking.
    pub fn freeze(bytes: &[u8], place: usize) -> Result<Self> {
        let whole = whole_pages(bytes.len());
        let frozen = may_lack().and_then(|()| FrozenPages::new(bytes, whole));
        let frozen = frozen
            .map_err(|error| lacking(&format!("{} bytes of a prefix", bytes.len()), error))?;
        Ok(Self { frozen: Arc::new(frozen), place: place..place.saturating_add(whole) })
    }

    /// Returns the part of this piece before the offset `end`, which is a page boundary. Returns `None` if
    /// the piece begins at or after `end`.
    pub fn up_to(&self, end: usize) -> Option<Self> {
        let end = end.min(self.place.end);
        (self.place.start < end).then(|| Self { place: self.place.start..end, ..self.clone() })
    }
}

/// A run of memory that begins with frozen bytes. The bytes after them are zero at first, and use no memory
/// until they are written.
#[derive(Debug)]
pub(super) struct Mapping {
    start: NonNull<u8>,
    size: usize,
    pieces: Vec<Piece>,
}

// SAFETY: a mapping owns its bytes, and gives access to them through references to it only.
unsafe impl Send for Mapping {}
// SAFETY: the same as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Reserves addresses for `size` bytes, and maps the pieces to the beginning. The pieces must be in
    /// order, without gaps.
    ///
    /// # Errors
    /// [`Backend`](Status::Backend) if the system lacks addresses or memory.
    pub fn new(pieces: Vec<Piece>, size: usize) -> Result<Self> {
        let used = pieces.last().map_or(0, |piece| piece.place.end);
        let size = whole_pages(size.max(used).max(1));
        let lacks = |error| lacking(&format!("{size} bytes of addresses for a cache"), error);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: this is a new mapping, at an address that the system chooses.
        let start = may_lack()
            .and_then(|()| unsafe { mmap_anonymous(std::ptr::null_mut(), size, ACCESS, flags) });
        let start =
            NonNull::new(start.map_err(lacks)?.cast()).ok_or(Errno::NOMEM).map_err(lacks)?;
        let mapping = Self { start, size, pieces };
        for Piece { frozen, place } in &mapping.pieces {
            debug_assert!(place.start % page() == 0 && place.end <= size);
            // SAFETY: the range is inside the new mapping, to which there are no references yet.
            let mapped = unsafe {
                let at = mapping.start.as_ptr().add(place.start);
                frozen.map(at, place.len())
            };
            mapped.map_err(lacks)?;
        }
        Ok(mapping)
    }

    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns the number of bytes for which addresses are reserved.
    pub fn size(&self) -> usize {
        self.size
    }

    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the memory was mapped with this size, and there are no references to it any more. The call
        // can only fail for other addresses.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.size) };
    }
}

/// Returns the size of a page in bytes.
pub(crate) fn page() -> usize {
    rustix::param::page_size()
}

/// Rounds bytes up to whole pages.
fn whole_pages(bytes: usize) -> usize {
    bytes.checked_next_multiple_of(page()).unwrap_or(usize::MAX - (usize::MAX % page()))
}

fn lacking(what: &str, error: Errno) -> Error {
    Error::new(Status::Backend, format_args!("no memory for {what}: {error}; free memory"))
}

/// Fails if a test makes allocations fail.
fn may_lack() -> rustix::io::Result<()> {
    #[cfg(test)]
    if super::shortage::is_now() {
        return Err(Errno::NOMEM);
    }
    Ok(())
}
