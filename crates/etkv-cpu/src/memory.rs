//! Memory that a store and its views share.

use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::ptr::NonNull;

use etkv_core::{Error, Result, Status};

/// A block of bytes, aligned to a cache line. The store writes to it while views hold it: all
/// access is by pointer.
#[derive(Debug)]
pub(crate) struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its bytes; who reads or writes them when is the store's to order.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    const ALIGN: usize = 64;

    /// Returns `size` bytes of zeros.
    ///
    /// # Errors
    /// [`Backend`](Status::Backend) if there is no such memory.
    pub fn zeroed(size: usize) -> Result<Self> {
        let lacking = || {
            Error::new(Status::Backend, format_args!("cannot allocate {size} bytes for a cache"))
        };
        let layout =
            Layout::from_size_align(size.max(Self::ALIGN), Self::ALIGN).map_err(|_| lacking())?;
        // SAFETY: the layout's size is not 0.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(lacking)?;
        Ok(Self { start, layout })
    }

    /// Returns the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}
