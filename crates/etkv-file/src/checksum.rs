//! Checksums of the parts of a file: 128 bits of XXH3. They detect accidental damage, not manipulation.

use twox_hash::XxHash3_128;

/// The number of bytes of a checksum.
pub const BYTES: usize = 16;

/// A checksum, little-endian.
pub type Checksum = [u8; BYTES];

/// The checksum of the bytes that have been added.
pub struct Sum {
    hash: XxHash3_128,
    n_bytes: usize,
}

impl Sum {
    pub fn new() -> Self {
        Self { hash: XxHash3_128::new(), n_bytes: 0 }
    }

    pub fn add(&mut self, bytes: &[u8]) {
        self.hash.write(bytes);
        self.n_bytes += bytes.len();
    }

    /// Returns the checksum and starts a new checksum.
    pub fn take(&mut self) -> Checksum {
        std::mem::replace(self, Self::new()).hash.finish_128().to_le_bytes()
    }

    /// Returns the checksum and starts a new checksum, if exactly `n_bytes` bytes have been added.
    pub fn take_after(&mut self, n_bytes: usize) -> Option<Checksum> {
        (self.n_bytes >= n_bytes).then(|| self.take())
    }
}

/// Returns the checksum of some bytes.
pub fn of(bytes: &[u8]) -> Checksum {
    XxHash3_128::oneshot(bytes).to_le_bytes()
}
