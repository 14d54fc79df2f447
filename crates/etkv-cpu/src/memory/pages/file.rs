//! Frozen bytes in an anonymous file, which every mapping has as its own pages until it writes to them.

use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{ftruncate, memfd_create, MemfdFlags};
use rustix::io::{pwrite, Errno, Result};
use rustix::mm::{mmap, MapFlags};

use super::ACCESS;

/// Whether mappings of the same bytes are the same memory.
pub const SHARES: bool = true;

/// Bytes that nothing writes to.
#[derive(Debug)]
pub struct Frozen {
    file: OwnedFd,
}

impl Frozen {
    /// Makes `len` bytes at `at`, whole pages, those from `offset` on.
    ///
    /// # Safety
    /// These pages are mapped, and no reference points into them.
    pub unsafe fn map(&self, at: *mut u8, len: usize, offset: u64) -> Result<()> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the caller's promise. The file has as many bytes, and nothing writes to it or cuts it.
        unsafe { mmap(at.cast::<c_void>(), len, ACCESS, flags, &self.file, offset) }.map(drop)
    }
}

/// Puts bytes into a file.
pub struct Writer {
    frozen: Arc<Frozen>,
    end: u64,
}

impl Writer {
    pub fn new() -> Result<Self> {
        let file = memfd_create(c"etkv-prefix", MemfdFlags::CLOEXEC)?;
        Ok(Self { frozen: Arc::new(Frozen { file }), end: 0 })
    }

    /// Adds bytes, and zeros up to `whole` bytes. Returns where they lie.
    pub fn add(&mut self, bytes: &[u8], whole: usize) -> Result<(Arc<Frozen>, u64)> {
        let offset = self.end;
        let end = offset.saturating_add(whole as u64);
        ftruncate(&self.frozen.file, end)?;
        let mut written = 0;
        while written < bytes.len() {
            match pwrite(&self.frozen.file, &bytes[written..], offset + written as u64) {
                Ok(0) => return Err(Errno::NOSPC),
                Ok(n) => written += n,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        self.end = end;
        Ok((Arc::clone(&self.frozen), offset))
    }
}
