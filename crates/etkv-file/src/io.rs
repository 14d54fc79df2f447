//! Files as readers and writers see them, wherever they are.

use std::io::{Read, Seek, Write};

use etkv_core::Result;

/// A file that is open for reading at any offset.
pub trait ReadSeek: Read + Seek + Send {}

impl<T: Read + Seek + Send> ReadSeek for T {}

/// Writes a file. It is called once.
pub type WriteFile<'a> = dyn FnMut(&mut dyn Write) -> Result<()> + 'a;
