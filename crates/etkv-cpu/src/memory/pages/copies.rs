//! Frozen bytes that every mapping copies, for systems without anonymous files. A file in a folder could be
//! shared, but would write the users' texts to the disk.

use rustix::io::{Errno, Result};

/// Whether mappings of the same bytes share memory.
pub const SHARES: bool = false;

/// Bytes that are never written.
#[derive(Debug)]
pub struct FrozenPages {
    bytes: Vec<u8>,
}

impl FrozenPages {
    /// Copies bytes to memory of the process, padded with zeros to `_whole` bytes when they are mapped.
    pub fn new(bytes: &[u8], _whole: usize) -> Result<Self> {
        let mut copy = Vec::new();
        copy.try_reserve_exact(bytes.len()).map_err(|_| Errno::NOMEM)?;
        copy.extend_from_slice(bytes);
        Ok(Self { bytes: copy })
    }

    /// Maps the first `len` bytes to the address `at`. Both are multiples of the page size.
    ///
    /// # Safety
    /// The pages at `at` must be mapped, and there must be no references to them.
    pub unsafe fn map(&self, at: *mut u8, len: usize) -> Result<()> {
        let bytes = &self.bytes[..len.min(self.bytes.len())];
        // SAFETY: the caller ensures that the pages are mapped. The memory after the bytes stays zero.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
        Ok(())
    }
}
