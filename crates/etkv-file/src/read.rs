//! Reads a file. Everything is checked before the cache changes, and sizes before memory is allocated.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use etkv_core::error::fail;
use etkv_core::{Error, Result, SaveCache, Status};

use crate::checksum::{self, Checksum, Sum};
use crate::header::{quoted, refused, tensors, Header, MAX_HEADER};
use crate::io::ReadSeek;

/// See [`load`](crate::load).
pub fn load(
    cache: &mut dyn SaveCache,
    path: &Path,
    fingerprint: &str,
    max_token_ids: usize,
) -> Result<Vec<i64>> {
    let file =
        opened(path).and_then(|(file, len)| OpenFile::new(Box::new(file), len, max_token_ids));
    file.and_then(|file| file.load(cache, fingerprint)).map_err(|error| match error.status() {
        Status::File => error.at(format_args!("cannot load {}", path.display())),
        _ => error,
    })
}

/// A file whose header and token ids have been read and verified. Its rows follow.
pub struct OpenFile {
    pub header: Header,
    pub tokens: Vec<i64>,
    file: Source,
    sums: Checksums,
}

impl OpenFile {
    /// Loads the rows into a cache, and returns the token ids.
    pub fn load(self, cache: &mut dyn SaveCache, fingerprint: &str) -> Result<Vec<i64>> {
        let Self { mut file, header, tokens, mut sums } = self;
        if header.fingerprint != fingerprint {
            fail!(
                File,
                "the file is of the model `{}`, expected `{fingerprint}`",
                quoted(header.fingerprint)
            );
        }
        header.check_tensors(&tensors(header.n_tokens, &cache.planes(&header.snapshot)?)?)?;
        cache.restore(&header.snapshot, &mut |rows, bytes| {
            file.read(bytes)?;
            if let Some(sum) = file.sum.take_after(rows.bytes()) {
                let side = if rows.id.values { "values" } else { "keys" };
                sums.check(sum, format_args!("the {side} of layer {}", rows.id.layer))?;
            }
            Ok(())
        })?;
        Ok(tokens)
    }

    /// Reads the header and the token ids of a file of `len` bytes. Refuses more ids than `max_token_ids`
    /// before it allocates memory for them.
    ///
    /// # Errors
    /// [`Capacity`](Status::Capacity) for too many ids, and [`File`](Status::File).
    pub fn new(file: Box<dyn ReadSeek>, len: u64, max_token_ids: usize) -> Result<Self> {
        let mut file = Source { file, len, sum: Sum::new() };
        let bytes = file.header()?;
        let header = Header::of_json(&bytes[8..])?;
        let expected = (bytes.len() as u64).saturating_add(header.data_bytes());
        if file.len != expected {
            fail!(File, "the file has {} bytes, but its header says {expected}", file.len);
        }
        if header.n_tokens > max_token_ids {
            fail!(
                Capacity,
                "the file has {} token ids, the maximum for this cache is {max_token_ids}",
                header.n_tokens
            );
        }
        let mut sums = Checksums(file.checksums(header.n_parts())?.into_iter());
        sums.check(checksum::of(&bytes), format_args!("the header"))?;
        file.go_to(bytes.len() as u64)?;
        drop(bytes);
        let tokens = file.tokens(header.n_tokens)?;
        sums.check(file.sum.take(), format_args!("the token ids"))?;
        Ok(Self { file, header, tokens, sums })
    }
}

/// The checksums of a file that have not been compared yet.
struct Checksums(std::vec::IntoIter<Checksum>);

impl Checksums {
    fn check(&mut self, found: Checksum, what: std::fmt::Arguments) -> Result<()> {
        match self.0.next() {
            Some(expected) if expected == found => Ok(()),
            _ => Err(refused(format_args!("the file is damaged: the checksum of {what} differs"))),
        }
    }
}

/// An open file, and the checksum of the bytes that have been read.
struct Source {
    file: Box<dyn ReadSeek>,
    len: u64,
    sum: Sum,
}

/// Opens a file. Returns it with its size in bytes.
pub fn opened(path: &Path) -> Result<(File, u64)> {
    let found = std::fs::metadata(path).map_err(unread)?;
    if !found.is_file() {
        fail!(File, "it is not a file");
    }
    let file = File::open(path).map_err(unread)?;
    let len = file.metadata().map_err(unread)?.len();
    Ok((file, len))
}

impl Source {
    fn read(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.file.read_exact(bytes).map_err(unread)?;
        self.sum.add(bytes);
        Ok(())
    }

    fn go_to(&mut self, at: u64) -> Result<()> {
        self.file.seek(SeekFrom::Start(at)).map_err(unread)?;
        self.sum = Sum::new();
        Ok(())
    }

    /// Returns the header, including its length field.
    fn header(&mut self) -> Result<Vec<u8>> {
        if self.len < 8 {
            fail!(File, "the file has {} bytes, the minimum is 8", self.len);
        }
        let mut length = [0; 8];
        self.read(&mut length)?;
        let most = MAX_HEADER.min(self.len - 8);
        let n = u64::from_le_bytes(length);
        if n > most {
            fail!(
                File,
                "the header has {n} bytes, the maximum is {most} in a file of {} bytes",
                self.len
            );
        }
        let mut bytes = zeroed(8 + n as usize)?;
        bytes[..8].copy_from_slice(&length);
        self.read(&mut bytes[8..])?;
        Ok(bytes)
    }

    /// Returns the checksums at the end of the file.
    fn checksums(&mut self, n: usize) -> Result<Vec<Checksum>> {
        let bytes = n as u64 * checksum::BYTES as u64;
        if bytes > self.len {
            fail!(File, "the file has {} bytes, but its {n} checksums need {bytes}", self.len);
        }
        self.go_to(self.len - bytes)?;
        let mut all = zeroed(bytes as usize)?;
        self.read(&mut all)?;
        let each = all.chunks_exact(checksum::BYTES);
        Ok(each.filter_map(|sum| sum.try_into().ok()).collect())
    }

    /// Reads `n` token ids. The size of the file must have been checked.
    fn tokens(&mut self, n: usize) -> Result<Vec<i64>> {
        let mut tokens = Vec::new();
        if tokens.try_reserve_exact(n).is_err() {
            return Err(lacking(n as u64 * 8));
        }
        let mut chunk = zeroed(8 << 13)?;
        while tokens.len() < n {
            let bytes = (n - tokens.len()).saturating_mul(8).min(chunk.len());
            let some = &mut chunk[..bytes];
            self.read(some)?;
            let each = some.chunks_exact(8).filter_map(|token| token.try_into().ok());
            tokens.extend(each.map(i64::from_le_bytes));
        }
        Ok(tokens)
    }
}

fn zeroed(n: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if bytes.try_reserve_exact(n).is_err() {
        return Err(lacking(n as u64));
    }
    bytes.resize(n, 0);
    Ok(bytes)
}

fn lacking(bytes: u64) -> Error {
    Error::new(Status::Backend, format_args!("out of memory: {bytes} bytes of a file"))
}

fn unread(error: std::io::Error) -> Error {
    refused(format_args!("{error}")).caused_by(error)
}
