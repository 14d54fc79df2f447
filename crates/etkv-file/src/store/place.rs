//! Where the files of a store lie: what is between the index and a folder or a bucket.

use std::fmt::Debug;
use std::io::{Read, Seek, Write};
use std::time::SystemTime;

use etkv_core::Result;

use crate::checksum::Sum;
use crate::write::token_bytes;

const BEGIN: &str = "prefix-";
const END: &str = ".safetensors";

/// A file of a store.
#[derive(Debug, Clone)]
pub struct Found {
    pub name: String,
    pub bytes: u64,
    /// When it was last used.
    pub used: SystemTime,
    /// What tells it from a file that had its name before.
    pub identity: u64,
}

/// A file that is open for reading at any offset.
pub trait ReadSeek: Read + Seek + Send {}

impl<T: Read + Seek + Send> ReadSeek for T {}

/// Writes a file. It is called once.
pub type WriteFile<'a> = dyn FnMut(&mut dyn Write) -> Result<()> + 'a;

/// A place where complete files appear under names, are never changed, and may be gone at any time.
pub trait Place: Debug + Send + Sync {
    /// Returns the stored files, without what others write or have removed at this moment.
    ///
    /// # Errors
    /// [`File`](etkv_core::Status::File), as below.
    fn files(&self) -> Result<Vec<Found>>;

    /// Opens a file. Returns it with its bytes.
    fn open(&self, name: &str) -> Result<(Box<dyn ReadSeek>, u64)>;

    /// Writes a file of `bytes` bytes, which has its name once it is complete. Where `write` fails there
    /// is none, and an older one of this name stays.
    fn put(&self, name: &str, bytes: u64, write: &mut WriteFile) -> Result<()>;

    /// Notes that a file is used.
    fn touch(&self, file: &Found);

    /// Removes a file. Another process may have been first.
    fn remove(&self, name: &str);

    /// Returns how many files are opened at once: more than one where each takes the time of a request.
    fn at_once(&self) -> usize {
        1
    }
}

/// Returns whether a file has a name of [`name_of`].
pub fn is_name(name: &str) -> bool {
    let digits = name.strip_prefix(BEGIN).and_then(|name| name.strip_suffix(END));
    digits.is_some_and(|digits| {
        digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
    })
}

/// Returns the name of the file of a text: the same in every process.
pub fn name_of(group: &str, tokens: &[i64]) -> String {
    let mut sum = Sum::new();
    sum.add(&(group.len() as u64).to_le_bytes());
    sum.add(group.as_bytes());
    token_bytes(tokens).for_each(|bytes| sum.add(&bytes));
    format!("{BEGIN}{:032x}{END}", u128::from_le_bytes(sum.take()))
}
