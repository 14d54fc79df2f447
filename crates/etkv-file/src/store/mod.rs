//! A folder of files, by the texts whose keys and values they hold.
//!
//! Any number of processes may use a folder. A file appears under its name when it is complete, and is
//! never changed. Each call looks at what is there.

mod folder;
mod index;

use std::path::Path;

use etkv_core::error::fail;
use etkv_core::{Cache, Result, Status};
use parking_lot::Mutex;
use tracing::{debug, warn};

use self::folder::{Folder, Found};
use self::index::{group_of, Index, Match};
use crate::header::Header;
use crate::{face, read, write, Labels};

/// The target of log events.
const TARGET: &str = "etkv::file";

/// The fewest tokens that are stored, and that are worth reading a file for.
pub const LEAST_TOKENS: usize = 32;

/// Beginnings of texts that outlive the process: what a cache has read of a text is stored in a folder,
/// and a cache that is to read a text that begins alike loads it.
///
/// A file holds a whole cache of one sequence. Another cache loads it if it has the same kind, layers and
/// formats, and if the model's fingerprint is the same, and is then rewound to what both texts have in
/// common. Layers with windows can be rewound a little only, so their files serve texts that go on near
/// their end.
#[derive(Debug)]
pub struct PrefixStore {
    folder: Folder,
    max_bytes: u64,
    index: Mutex<Index>,
}

impl PrefixStore {
    /// Opens a folder, which is made if it is not there, for the user alone. Removes what a process left
    /// there that was killed while it wrote, an hour ago or longer.
    ///
    /// Files take `max_bytes` at most: [`save`](Self::save) removes those that were used least recently. The
    /// new file is there besides while it is written.
    ///
    /// # Errors
    /// [`File`](Status::File) if the folder cannot be made or read.
    pub fn open(folder: &Path, max_bytes: u64) -> Result<Self> {
        let folder = Folder::open(folder)?;
        Ok(Self { folder, max_bytes, index: Mutex::default() })
    }

    /// Returns the folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the number of files in the folder, and their bytes.
    ///
    /// # Errors
    /// [`File`](Status::File) if the folder cannot be read.
    pub fn usage(&self) -> Result<(usize, u64)> {
        let found = self.folder.files()?;
        Ok((found.len(), found.iter().map(|file| file.bytes).sum()))
    }

    /// Stores the contents of a cache, which are those of the text `labels.tokens`. Returns whether a file
    /// was written: none is for a text that is shorter than [`LEAST_TOKENS`], that the folder has already, or
    /// that takes more bytes than the folder may have. Files whose texts this one begins with go.
    ///
    /// # Errors
    /// - [`InvalidArgument`](Status::InvalidArgument) if the cache holds several sequences, or not as many
    ///   positions as there are tokens.
    /// - Those of [`save`](crate::save).
    pub fn save(&self, cache: &mut dyn Cache, labels: Labels) -> Result<bool> {
        let tokens = labels.tokens;
        let length = cache.next_position()?;
        if usize::try_from(length).ok() != Some(tokens.len()) {
            fail!(
                InvalidArgument,
                "the cache holds {length} positions, and the text has {} tokens",
                tokens.len()
            );
        }
        if tokens.len() < LEAST_TOKENS {
            return Ok(false);
        }
        let rewindable_to = cache.rewindable_to()?;
        let saving = face(cache)?;
        let snapshot = saving.snapshot()?;
        let group = group_of(labels.fingerprint, &snapshot)?;
        self.refresh()?;
        if let Some(entry) = self.index.lock().covering(&group, tokens) {
            self.folder.touch(&entry.name);
            return Ok(false);
        }
        let planes = saving.planes(&snapshot)?;
        let mut header = Header::new(labels.fingerprint, snapshot, tokens.len(), &planes)?;
        header.rewindable_to = Some(rewindable_to);
        let bytes = header.data_bytes();
        if bytes > self.max_bytes {
            debug!(target: TARGET, bytes, most = self.max_bytes, "a text is larger than its folder");
            return Ok(false);
        }
        let name = folder::name_of(&group, tokens);
        write::save(saving, &self.folder.file(&name), labels, Some(rewindable_to))?;
        let covered = {
            let mut index = self.index.lock();
            let least = usize::try_from(rewindable_to).unwrap_or_default();
            let covered = index.covered(&group, tokens, least);
            covered.iter().for_each(|name| index.remove(name));
            index.add(&name, Some((&header, tokens.to_vec())))?;
            covered
        };
        covered.iter().for_each(|name| self.folder.remove(name));
        debug!(target: TARGET, tokens = tokens.len(), bytes, file = name, "a text was stored");
        self.make_room(&name)?;
        Ok(true)
    }

    /// Returns how many of the first tokens of a text a cache like this one could load.
    ///
    /// # Errors
    /// Those of [`load`](Self::load), except for a cache that holds positions.
    pub fn n_stored(
        &self,
        cache: &mut dyn Cache,
        fingerprint: &str,
        tokens: &[i64],
    ) -> Result<usize> {
        let matches = self.matches(cache, fingerprint, tokens)?;
        Ok(matches.first().map_or(0, |found| found.n_tokens))
    }

    /// Loads the longest beginning of a text that the folder has. Returns how many of its first tokens
    /// the cache then holds: 0 for none, or [`LEAST_TOKENS`] or more. The host runs the rest. The model
    /// computes logits for what runs only, so it passes the text without its last token.
    ///
    /// A file that is damaged, or gone meanwhile, is passed by.
    ///
    /// # Errors
    /// - [`InvalidArgument`](Status::InvalidArgument) if the cache is not empty.
    /// - [`File`](Status::File) if the folder cannot be read.
    /// - [`Step`](Status::Step) while a step is open.
    /// - [`Unsupported`](Status::Unsupported) for a kind or a storage that cannot be loaded.
    /// - [`Backend`](Status::Backend) if the cache is poisoned or memory is lacking.
    pub fn load(&self, cache: &mut dyn Cache, fingerprint: &str, tokens: &[i64]) -> Result<usize> {
        if cache.length() > 0 {
            fail!(
                InvalidArgument,
                "the cache holds {} positions; clear it before you load others",
                cache.length()
            );
        }
        let matches = self.matches(cache, fingerprint, tokens)?;
        for Match { name, n_tokens } in matches {
            match self.load_file(cache, fingerprint, &name, &tokens[..n_tokens]) {
                Ok(()) => {
                    self.folder.touch(&name);
                    debug!(target: TARGET, tokens = n_tokens, file = name, "a text was loaded");
                    return Ok(n_tokens);
                }
                Err(error) if error.status() == Status::File => {
                    warn!(target: TARGET, %error, "a stored text is passed by");
                    self.index.lock().add(&name, None)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(0)
    }

    fn load_file(
        &self,
        cache: &mut dyn Cache,
        fingerprint: &str,
        name: &str,
        tokens: &[i64],
    ) -> Result<()> {
        let found = crate::load(cache, &self.folder.file(name), fingerprint)?;
        let n = tokens.len() as i32;
        let fits = found.starts_with(tokens) && cache.next_position() == Ok(found.len() as i32);
        let rewound = match fits {
            true => cache.rewind(n),
            false => Ok(()),
        };
        if !fits || rewound.is_err() {
            cache.clear(false)?;
            rewound?;
            fail!(File, "the file {name} holds another text than it did");
        }
        Ok(())
    }

    /// Returns the files that hold beginnings of a text, those with the longest first.
    fn matches(
        &self,
        cache: &mut dyn Cache,
        fingerprint: &str,
        tokens: &[i64],
    ) -> Result<Vec<Match>> {
        let capacity = usize::try_from(cache.capacity()).unwrap_or_default();
        let group = group_of(fingerprint, &face(cache)?.snapshot()?)?;
        self.refresh()?;
        let index = self.index.lock();
        let matches = index.matches(&group, tokens, LEAST_TOKENS, capacity).collect();
        drop(index);
        Ok(matches)
    }

    /// Reads the beginnings of files that are new, and forgets those that are gone.
    fn refresh(&self) -> Result<()> {
        let found = self.folder.files()?;
        let mut index = self.index.lock();
        index.keep(|name| found.iter().any(|file| file.name == name));
        for Found { name, .. } in &found {
            if index.knows(name) {
                continue;
            }
            match read::beginning(&self.folder.file(name)) {
                Ok((header, tokens)) => index.add(name, Some((&header, tokens)))?,
                Err(error) => {
                    warn!(target: TARGET, %error, file = name, "a stored text cannot be used");
                    index.add(name, None)?;
                }
            }
        }
        Ok(())
    }

    /// Removes files, those that were used least recently first, until the rest fits. Keeps the newest.
    fn make_room(&self, newest: &str) -> Result<()> {
        let mut files = self.folder.files()?;
        files.sort_unstable_by_key(|file| (file.name == newest, file.used));
        let mut bytes: u64 = files.iter().map(|file| file.bytes).sum();
        for file in files.iter().filter(|file| file.name != newest) {
            if bytes <= self.max_bytes {
                break;
            }
            self.folder.remove(&file.name);
            self.index.lock().remove(&file.name);
            bytes -= file.bytes;
            debug!(target: TARGET, file = file.name, bytes = file.bytes, "a stored text made room");
        }
        Ok(())
    }
}
