//! The files of a store in a folder.

use std::fmt::Display;
use std::fs::{self, DirBuilder, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use etkv_core::{Error, Result};
use tracing::debug;

use super::place::{is_name, StorePlace, StoredFile};
use super::TARGET;
use crate::header::refused;
use crate::io::{ReadSeek, WriteFile};
use crate::{read, write};

/// The maximum time for writing a file. Older incomplete files are removed.
const WRITTEN_WITHIN: Duration = Duration::from_secs(3600);

#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    pub fn open(path: &Path) -> Result<Self> {
        let mut builder = DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder
            .create(path)
            .map_err(|error| wrong(format_args!("cannot make {}", path.display()), error))?;
        let folder = Self(path.to_owned());
        folder.tidy()?;
        Ok(folder)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn all(&self, fits: impl Fn(&str) -> bool) -> Result<Vec<StoredFile>> {
        let unread =
            |error| wrong(format_args!("cannot read the folder {}", self.0.display()), error);
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.0).map_err(unread)? {
            let entry = entry.map_err(unread)?;
            let Some(name) =
                entry.file_name().to_str().filter(|name| fits(name)).map(str::to_owned)
            else {
                continue;
            };
            let Ok(found) = entry.metadata() else { continue };
            if found.is_file() {
                let used = found.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                files.push(StoredFile {
                    name,
                    bytes: found.len(),
                    used,
                    identity: identity_of(&found),
                });
            }
        }
        Ok(files)
    }

    /// Removes incomplete files that are no longer being written.
    fn tidy(&self) -> Result<()> {
        let now = SystemTime::now();
        for file in self.all(|name| name.starts_with(".etkv-") && name.ends_with(".part"))? {
            let age = now.duration_since(file.used).unwrap_or_default();
            if age > WRITTEN_WITHIN {
                self.remove(&file.name);
            }
        }
        Ok(())
    }
}

impl StorePlace for Folder {
    fn files(&self) -> Result<Vec<StoredFile>> {
        self.all(is_name)
    }

    fn open(&self, name: &str) -> Result<(Box<dyn ReadSeek>, u64)> {
        let (file, bytes) = read::opened(&self.file(name))?;
        Ok((Box::new(file), bytes))
    }

    fn put(&self, name: &str, _bytes: u64, write: &mut WriteFile) -> Result<()> {
        write::put(&self.file(name), write)
    }

    /// Sets the modification time, which the next process reads as the time of the last use.
    fn touch(&self, file: &StoredFile) {
        let touched = File::options()
            .append(true)
            .open(self.file(&file.name))
            .and_then(|file| file.set_modified(SystemTime::now()));
        if let Err(error) = touched {
            debug!(target: TARGET, %error, file = file.name, "cannot record the use of a stored text");
        }
    }

    fn remove(&self, name: &str) {
        if let Err(error) = fs::remove_file(self.file(name)) {
            debug!(target: TARGET, %error, file = name, "cannot remove a stored text");
        }
    }
}

#[cfg(unix)]
fn identity_of(found: &fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(found)
}

#[cfg(not(unix))]
fn identity_of(found: &fs::Metadata) -> u64 {
    found.len()
}

fn wrong(what: impl Display, error: std::io::Error) -> Error {
    refused(format_args!("{what}: {error}")).caused_by(error)
}
