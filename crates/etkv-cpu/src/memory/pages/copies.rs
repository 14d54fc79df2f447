//! Frozen bytes that every mapping copies, for systems without anonymous files. A file in a folder would
//! work, but would write the users' texts to the disk.

use std::sync::Arc;

use rustix::io::{Errno, Result};

/// Whether mappings of the same bytes are the same memory.
pub const SHARES: bool = false;

/// Bytes that nothing writes to.
#[derive(Debug)]
pub struct FrozenPages {
    bytes: Vec<u8>,
}

impl FrozenPages {
    /// Maps `len` bytes at `at`, whole pages, from `offset` on.
    ///
    /// # Safety
    /// These pages are mapped, and no reference points into them.
    pub unsafe fn map(&self, at: *mut u8, len: usize, offset: u64) -> Result<()> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.bytes.len());
        let bytes = &self.bytes[start..start.saturating_add(len).min(self.bytes.len())];
        // SAFETY: the caller's promise. The memory after the bytes stays zero.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
        Ok(())
    }
}

/// Keeps copies.
pub struct Writer;

impl Writer {
    pub fn new() -> Result<Self> {
        Ok(Self)
    }

    /// Adds bytes, padded with zeros to `_whole` bytes. Returns where they lie.
    pub fn add(&mut self, bytes: &[u8], _whole: usize) -> Result<(Arc<FrozenPages>, u64)> {
        let mut copy = Vec::new();
        copy.try_reserve_exact(bytes.len()).map_err(|_| Errno::NOMEM)?;
        copy.extend_from_slice(bytes);
        Ok((Arc::new(FrozenPages { bytes: copy }), 0))
    }
}
