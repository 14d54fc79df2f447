//! Checksums of the parts of a file: 128 bits of XXH3, which tells chance damage, not intent.

use twox_hash::XxHash3_128;

/// The bytes of a checksum.
pub const BYTES: usize = 16;

/// A checksum, lowest byte first.
pub type Checksum = [u8; BYTES];

/// The checksum of what was added.
pub struct Sum(XxHash3_128);

impl Sum {
    pub fn new() -> Self {
        Self(XxHash3_128::new())
    }

    pub fn add(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// Returns the checksum, and begins anew.
    pub fn take(&mut self) -> Checksum {
        std::mem::replace(self, Self::new()).0.finish_128().to_le_bytes()
    }
}

/// Returns the checksum of some bytes.
pub fn of(bytes: &[u8]) -> Checksum {
    XxHash3_128::oneshot(bytes).to_le_bytes()
}
