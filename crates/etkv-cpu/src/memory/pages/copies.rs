//! Frozen bytes that every mapping copies, for systems without anonymous files. A file in a folder would do,
//! and would bring what users wrote to the disk.

use std::sync::Arc;

use rustix::io::{Errno, Result};

/// Whether mappings of the same bytes are the same memory.
pub const SHARES: bool = false;

/// Bytes that nothing writes to.
#[derive(Debug)]
pub struct Frozen {
    bytes: Vec<u8>,
}

impl Frozen {
    /// Makes `len` bytes at `at`, whole pages, those from `offset` on.
    ///
    /// # Safety
    /// These pages are mapped, and no reference points into them.
    pub unsafe fn map(&self, at: *mut u8, len: usize, offset: u64) -> Result<()> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.bytes.len());
        let bytes = &self.bytes[start..start.saturating_add(len).min(self.bytes.len())];
        // SAFETY: the caller's promise. What is behind the bytes stays zero.
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

    /// Adds bytes, and zeros up to `_whole` bytes. Returns where they lie.
    pub fn add(&mut self, bytes: &[u8], _whole: usize) -> Result<(Arc<Frozen>, u64)> {
        let mut copy = Vec::new();
        copy.try_reserve_exact(bytes.len()).map_err(|_| Errno::NOMEM)?;
        copy.extend_from_slice(bytes);
        Ok((Arc::new(Frozen { bytes: copy }), 0))
    }
}
