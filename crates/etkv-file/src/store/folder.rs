//! The files of a store.

use std::fmt::Display;
use std::fs::{self, DirBuilder, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use etkv_core::{Error, Result};
use tracing::debug;

use super::TARGET;
use crate::checksum::Sum;
use crate::header::refused;
use crate::write::token_bytes;

const BEGIN: &str = "prefix-";
const END: &str = ".safetensors";

/// How long a file that is being written may take.
const WRITTEN_WITHIN: Duration = Duration::from_secs(3600);

/// A file of the folder.
#[derive(Debug, Clone)]
pub struct Found {
    pub name: String,
    pub bytes: u64,
    /// When it was last used.
    pub used: SystemTime,
    /// What tells it from a file that had its name before.
    pub identity: u64,
}

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

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Returns the stored files, without what others write or have removed at this moment.
    pub fn files(&self) -> Result<Vec<Found>> {
        self.all(is_name)
    }

    fn all(&self, fits: impl Fn(&str) -> bool) -> Result<Vec<Found>> {
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
                files.push(Found { name, bytes: found.len(), used, identity: identity_of(&found) });
            }
        }
        Ok(files)
    }

    /// Notes that a file is used. The next process reads it from the time of its last change.
    pub fn touch(&self, name: &str) {
        let touched = File::options()
            .append(true)
            .open(self.file(name))
            .and_then(|file| file.set_modified(SystemTime::now()));
        if let Err(error) = touched {
            debug!(target: TARGET, %error, file = name, "the use of a stored text is not noted");
        }
    }

    /// Removes a file. Another process may have been first.
    pub fn remove(&self, name: &str) {
        if let Err(error) = fs::remove_file(self.file(name)) {
            debug!(target: TARGET, %error, file = name, "a stored text is not removed");
        }
    }

    /// Removes the files that were never completed.
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

/// Returns whether a file has a name of [`name_of`].
fn is_name(name: &str) -> bool {
    let digits = name.strip_prefix(BEGIN).and_then(|name| name.strip_suffix(END));
    digits.is_some_and(|digits| {
        digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
    })
}

#[cfg(unix)]
fn identity_of(found: &fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(found)
}

#[cfg(not(unix))]
fn identity_of(found: &fs::Metadata) -> u64 {
    found.len()
}

/// Returns the name of the file of a text: the same in every process.
pub fn name_of(group: &str, tokens: &[i64]) -> String {
    let mut sum = Sum::new();
    sum.add(&(group.len() as u64).to_le_bytes());
    sum.add(group.as_bytes());
    token_bytes(tokens).for_each(|bytes| sum.add(&bytes));
    format!("{BEGIN}{:032x}{END}", u128::from_le_bytes(sum.take()))
}

fn wrong(what: impl Display, error: std::io::Error) -> Error {
    refused(format_args!("{what}: {error}")).caused_by(error)
}
