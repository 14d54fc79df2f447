//! The interface between a store's index and its files in a folder or a bucket.

use std::fmt::Debug;
use std::time::SystemTime;

use etkv_core::Result;

use crate::checksum::Sum;
use crate::io::{ReadSeek, WriteFile};
use crate::write::token_bytes;

const BEGIN: &str = "prefix-";
const END: &str = ".safetensors";

/// A file of a store.
#[derive(Debug, Clone)]
pub struct StoredFile {
    pub name: String,
    pub bytes: u64,
    /// The time of its last use.
    pub used: SystemTime,
    /// A number that identifies the file: another file with the same name has another number.
    pub identity: u64,
}

/// Storage of files. A file appears under its name once it is complete. It never changes, and it may disappear at any
/// time.
pub trait StorePlace: Debug + Send + Sync {
    /// Returns the complete files.
    ///
    /// # Errors
    /// [`File`](etkv_core::Status::File), as in the functions below.
    fn files(&self) -> Result<Vec<StoredFile>>;

    /// Opens a file. Returns it with its size in bytes.
    fn open(&self, name: &str) -> Result<(Box<dyn ReadSeek>, u64)>;

    /// Writes a file of `bytes` bytes. The file gets its name once it is complete. If `write` fails, no file is
    /// created, and an older file of this name remains.
    fn put(&self, name: &str, bytes: u64, write: &mut WriteFile) -> Result<()>;

    /// Records a use of a file.
    fn touch(&self, file: &StoredFile);

    /// Removes a file. Another process may have removed it first.
    fn remove(&self, name: &str);

    /// Returns the number of files that should be opened at once. It is more than 1 if opening a file is a request to
    /// a server.
    fn at_once(&self) -> usize {
        1
    }
}

/// Returns whether a file name has the form of [`name_of`].
pub fn is_name(name: &str) -> bool {
    let digits = name.strip_prefix(BEGIN).and_then(|name| name.strip_suffix(END));
    digits.is_some_and(|digits| {
        digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
    })
}

/// Returns the file name of a text, which is the same in every process.
pub fn name_of(group: &str, tokens: &[i64]) -> String {
    let mut sum = Sum::new();
    sum.add(&(group.len() as u64).to_le_bytes());
    sum.add(group.as_bytes());
    token_bytes(tokens).for_each(|bytes| sum.add(&bytes));
    format!("{BEGIN}{:032x}{END}", u128::from_le_bytes(sum.take()))
}
