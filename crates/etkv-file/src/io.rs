//! The interfaces to files, independent of where they are stored.

use std::io::{Read, Seek, Write};

use etkv_core::Result;

/// A file that can be read from any offset.
pub trait ReadSeek: Read + Seek + Send {}

impl<T: Read + Seek + Send> ReadSeek for T {}

/// Writes the contents of a file. Called once.
pub type WriteFile<'a> = dyn FnMut(&mut dyn Write) -> Result<()> + 'a;
