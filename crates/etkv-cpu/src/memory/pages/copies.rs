//! Frozen bytes that every mapping copies, for systems without anonymous files. A file in a folder could be
//! shared, but would write the users' texts to the disk.

use std::sync::Arc;

use rustix::io::{Errno, Result};

/// Whether mappings of the same bytes share memory.
pub const SHARES: bool = false;

/// Bytes that are never written.
#[derive(Debug)]
pub struct FrozenPages {
    bytes: Vec<u8>,
}

impl FrozenPages {
    /// Maps `len` bytes from `offset` on to the address `at`. All of these are multiples of the page size.
    ///
    /// # Safety
    /// The pages at `at` must be mapped, and there must be no references to them.
    pub unsafe fn map(&self, at: *mut u8, len: usize, offset: u64) -> Result<()> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.bytes.len());
        let bytes = &self.bytes[start..start.saturating_add(len).min(self.bytes.len())];
        // SAFETY: the caller ensures that the pages are mapped. The memory after the bytes stays zero.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
        Ok(())
    }
}

/// Copies bytes to memory of the process.
pub struct Writer;

impl Writer {
    pub fn new() -> Result<Self> {
        Ok(Self)
    }

    /// Adds bytes, padded with zeros to `_whole` bytes. Returns their pages and offset.
    pub fn add(&mut self, bytes: &[u8], _whole: usize) -> Result<(Arc<FrozenPages>, u64)> {
        let mut copy = Vec::new();
        copy.try_reserve_exact(bytes.len()).map_err(|_| Errno::NOMEM)?;
        copy.extend_from_slice(bytes);
        Ok((Arc::new(FrozenPages { bytes: copy }), 0))
    }
}
