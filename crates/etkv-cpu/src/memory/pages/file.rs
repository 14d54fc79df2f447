//! Frozen bytes in an anonymous file. Mappings share the pages of the file until they write to them.
//!
//! All frozen bytes of a process are in one file, because the number of open files is limited. When bytes are
//! not used any more, a hole is punched in their place.

use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::fs::{fallocate, ftruncate, memfd_create, FallocateFlags, MemfdFlags};
use rustix::io::{pwrite, Errno, Result};
use rustix::mm::{mmap, MapFlags};
use rustix::process::{getpid, getrlimit, Pid, Resource};

use super::ACCESS;

/// Whether mappings of the same bytes share memory.
pub const SHARES: bool = true;

/// The maximum size of a file. Holes use no memory, but their offsets are not reused.
const MAX: u64 = 1 << 40;

/// The file to which new bytes are written.
static CURRENT: Mutex<Weak<PrefixFile>> = Mutex::new(Weak::new());

/// A file with the frozen bytes of many prefixes.
#[derive(Debug)]
struct PrefixFile {
    file: OwnedFd,
    /// The process that created the file. A forked process has the same file, but does not change it.
    owner: Pid,
    end: Mutex<u64>,
}

impl PrefixFile {
    /// Returns a file with room for `len` bytes, and the offset of these bytes.
    fn with_room(len: u64) -> Result<(Arc<Self>, u64)> {
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        let most = getrlimit(Resource::Fsize).current.unwrap_or(MAX).min(MAX);
        if let Some(shared) = current.upgrade().filter(|shared| shared.owner == getpid()) {
            if let Some(start) = shared.extend(len, most)? {
                return Ok((shared, start));
            }
        }
        let file = memfd_create(c"etkv-prefixes", MemfdFlags::CLOEXEC)?;
        let shared = Arc::new(Self { file, owner: getpid(), end: Mutex::default() });
        // If `len` exceeds the maximum size of a file, this fails with the system's error.
        let start = shared.extend(len, u64::MAX)?.unwrap_or_default();
        *current = Arc::downgrade(&shared);
        Ok((shared, start))
    }

    /// Reserves `len` bytes at the end. Returns `None` if the file would become longer than `most`.
    fn extend(&self, len: u64, most: u64) -> Result<Option<u64>> {
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        let (start, new_end) = (*end, end.saturating_add(len));
        if new_end > most {
            return Ok(None);
        }
        ftruncate(&self.file, new_end)?;
        *end = new_end;
        Ok(Some(start))
    }
}

/// Bytes that are never written: a run of whole pages of a file.
#[derive(Debug)]
pub struct FrozenPages {
    shared: Arc<PrefixFile>,
    start: u64,
    len: u64,
}

impl FrozenPages {
    /// Writes bytes to the file, padded with zeros to `whole` bytes.
    pub fn new(bytes: &[u8], whole: usize) -> Result<Self> {
        let len = whole as u64;
        let (shared, start) = PrefixFile::with_room(len)?;
        // If a later operation fails, dropping this frees the written bytes.
        let frozen = Self { shared, start, len };
        let mut written = 0;
        while written < bytes.len() {
            match pwrite(&frozen.shared.file, &bytes[written..], start + written as u64) {
                Ok(0) => return Err(Errno::NOSPC),
                Ok(n) => written += n,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(frozen)
    }

    /// Maps the first `len` bytes to the address `at`. Both are multiples of the page size.
    ///
    /// # Safety
    /// The pages at `at` must be mapped, and there must be no references to them.
    pub unsafe fn map(&self, at: *mut u8, len: usize) -> Result<()> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the caller ensures that the pages are mapped. The file has that many bytes, and they do not
        // change while this object exists.
        unsafe { mmap(at.cast::<c_void>(), len, ACCESS, flags, &self.shared.file, self.start) }
            .map(drop)
    }
}

impl Drop for FrozenPages {
    fn drop(&mut self) {
        if self.len > 0 && self.shared.owner == getpid() {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // If this fails, the bytes are freed when the file is closed.
            let _ = fallocate(&self.shared.file, flags, self.start, self.len);
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{seek, SeekFrom};

    use super::*;

    /// The first byte from `offset` on that is not in a hole. Other tests have bytes in the same file.
    fn data_from(file: &OwnedFd, offset: u64) -> u64 {
        match seek(file, SeekFrom::Data(offset)) {
            Err(Errno::NXIO) => u64::MAX,
            found => found.unwrap(),
        }
    }

    #[test]
    fn many_runs_are_in_one_file_and_go_with_their_last_reader() {
        let page = rustix::param::page_size();
        let bytes = vec![7; 3 * page - 5];
        let new = || Arc::new(FrozenPages::new(&bytes, 3 * page).unwrap());
        let runs: Vec<Arc<FrozenPages>> = (0..100).map(|_| new()).collect();
        let shared = Arc::clone(&runs[0].shared);
        assert!(runs.iter().all(|run| Arc::ptr_eq(&run.shared, &shared)));
        let ranges: Vec<(u64, u64)> = runs.iter().map(|run| (run.start, run.len)).collect();
        for &(start, _) in &ranges {
            assert_eq!(data_from(&shared.file, start), start);
        }
        let reader = Arc::clone(&runs[40]);
        drop(runs);
        for &(start, len) in &ranges {
            let data = data_from(&shared.file, start);
            assert_eq!(data < start + len, start == reader.start, "data at {data} of {start}");
        }
        let start = reader.start;
        drop(reader);
        assert!(data_from(&shared.file, start) >= start + ranges[40].1);
    }
}
