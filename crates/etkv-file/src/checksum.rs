//! Checksums of the parts of a file: 128 bits of XXH3, which tells chance damage, not intent.

use twox_hash::XxHash3_128;

/// The bytes of a checksum.
pub const BYTES: usize = 16;

/// A checksum, lowest byte first.
pub type Checksum = [u8; BYTES];

/// The checksum of what was added.
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

    /// Returns the checksum, and begins anew.
    pub fn take(&mut self) -> Checksum {
        std::mem::replace(self, Self::new()).hash.finish_128().to_le_bytes()
    }

    /// Returns the checksum and begins anew, if all `n_bytes` of a part were added.
    pub fn take_after(&mut self, n_bytes: usize) -> Option<Checksum> {
        (self.n_bytes >= n_bytes).then(|| self.take())
    }
}

/// Returns the checksum of some bytes.
pub fn of(bytes: &[u8]) -> Checksum {
    XxHash3_128::oneshot(bytes).to_le_bytes()
}
