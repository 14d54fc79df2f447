//! Writes a file.

use std::io::Write;
use std::path::Path;

use etkv_core::{Error, Result, SaveCache};

use crate::checksum::{self, Sum};
use crate::header::{refused, Header};
use crate::io::WriteFile;
use crate::Labels;

/// Returns the header of a file with the contents of a cache.
pub fn header_of(
    cache: &mut dyn SaveCache,
    labels: Labels,
    rewindable_to: Option<i32>,
) -> Result<Header> {
    let snapshot = cache.snapshot()?;
    let planes = cache.planes(&snapshot)?;
    let mut header = Header::new(labels.fingerprint, snapshot, labels.tokens.len(), &planes)?;
    header.rewindable_to = rewindable_to;
    Ok(header)
}

/// Writes a file with this header, these tokens, and the rows of the cache. The cache must not have changed since the
/// header was created.
pub fn save(cache: &dyn SaveCache, path: &Path, header: &Header, tokens: &[i64]) -> Result<()> {
    put(path, &mut |file| write(cache, header, tokens, file, path))
}

/// Writes a file next to `path` under a temporary name, and renames it once it is complete and on the disk.
pub fn put(path: &Path, write: &mut WriteFile) -> Result<()> {
    let wrong = |error: std::io::Error| unwritten(path, error);
    if std::fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return Err(refused(format_args!("cannot write {}: it is not a file", path.display())));
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    // Only the user of this process can read the file. It is removed if anything fails.
    let mut file = tempfile::Builder::new()
        .prefix(".etkv-")
        .suffix(".part")
        .tempfile_in(folder)
        .map_err(wrong)?;
    write(&mut file)?;
    file.as_file().sync_all().map_err(wrong)?;
    file.persist(path).map_err(|error| unwritten(path, error.error))?;
    sync_folder(folder).map_err(wrong)
}

/// Writes the contents of a file to `file`. Errors contain `path`.
pub fn write(
    cache: &dyn SaveCache,
    header: &Header,
    tokens: &[i64],
    file: &mut dyn Write,
    path: &Path,
) -> Result<()> {
    let wrong = |error: std::io::Error| unwritten(path, error);
    let bytes = header.to_bytes()?;
    file.write_all(&bytes).map_err(wrong)?;
    let mut sums = vec![checksum::of(&bytes)];

    let mut sum = Sum::new();
    for bytes in token_bytes(tokens) {
        sum.add(&bytes);
        file.write_all(&bytes).map_err(wrong)?;
    }
    sums.push(sum.take());

    cache.read_rows(&header.snapshot, &mut |rows, bytes| {
        sum.add(bytes);
        file.write_all(bytes).map_err(wrong)?;
        sums.extend(sum.take_after(rows.bytes()));
        Ok(())
    })?;
    file.write_all(&sums.concat()).map_err(wrong)
}

/// Returns the bytes of token ids in a file, in chunks.
pub fn token_bytes(tokens: &[i64]) -> impl Iterator<Item = Vec<u8>> + '_ {
    tokens.chunks(1 << 16).map(|some| some.iter().flat_map(|token| token.to_le_bytes()).collect())
}

fn unwritten(path: &Path, error: std::io::Error) -> Error {
    refused(format_args!("cannot write {}: {error}", path.display())).caused_by(error)
}

/// Makes a new name in the folder durable.
#[cfg(unix)]
fn sync_folder(folder: &Path) -> std::io::Result<()> {
    std::fs::File::open(folder)?.sync_all()
}

#[cfg(not(unix))]
fn sync_folder(_: &Path) -> std::io::Result<()> {
    Ok(())
}
