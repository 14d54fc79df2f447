//! A folder of files, by the texts whose keys and values they hold.
//!
//! Any number of processes may use a folder. A file appears under its name when it is complete, and is
//! never changed. Each call looks at what is there.

mod folder;
pub(crate) mod index;
pub(crate) mod texts;

use std::collections::HashSet;
use std::error::Error as _;
use std::path::Path;

use etkv_core::error::fail;
use etkv_core::{Cache, Result, Status};
use parking_lot::Mutex;
use tracing::{debug, warn};

use self::folder::Folder;
use self::index::{group_of, Index, Match};
use crate::read::Opened;
use crate::{face, write, Labels};

/// The target of log events.
pub(crate) const TARGET: &str = "etkv::file";

/// The most files that are tried for a text.
pub(crate) const MOST_TRIED: usize = 8;

/// The fewest tokens that are stored, and that are worth reading a file for.
pub const LEAST_TOKENS: usize = 32;

/// Beginnings of texts that outlive the process: what a cache has read of a text is stored in a folder,
/// and a cache that is to read a text that begins alike loads it.
///
/// A file holds a whole cache of one sequence. Another cache loads it if it has the same kind, layers and
/// formats, and if the model's fingerprint is the same, and is then rewound to what both texts have in
/// common. Layers with windows can be rewound a little only, so their files serve texts that go on near
/// their end, in caches of the same capacity and `max_step_tokens`.
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
    /// was written. None is for a text that is shorter than [`LEAST_TOKENS`], that the folder has already,
    /// or that takes more bytes than the folder may have; nor for a cache that was converted by hand. Files
    /// go whose texts this one begins with, if it serves all that they do.
    ///
    /// # Errors
    /// - [`InvalidArgument`](Status::InvalidArgument) for an empty fingerprint, and if the cache does not
    ///   hold the positions of all tokens, of sequence 0 alone and without candidates.
    /// - Those of [`save`](crate::save).
    pub fn save(&self, cache: &mut dyn Cache, labels: Labels) -> Result<bool> {
        let tokens = labels.tokens;
        check_fingerprint(labels.fingerprint)?;
        let length = text_length(cache)?;
        if usize::try_from(length).ok() != Some(tokens.len()) {
            fail!(
                InvalidArgument,
                "the cache holds {length} positions, and the text has {} tokens",
                tokens.len()
            );
        }
        let formats = cache.config().formats_at(length);
        if tokens.len() < LEAST_TOKENS || cache.formats() != formats {
            return Ok(false);
        }
        // A text that is still shorter than where rows are converted has other formats.
        let converted_at = cache.config().quantized_kv_start.filter(|&start| start <= length);
        let rewindable_to = cache.rewindable_to()?.max(converted_at.unwrap_or_default());
        let least = usize::try_from(rewindable_to).unwrap_or_default();
        let capacity = usize::try_from(cache.capacity()).unwrap_or_default();
        let group = group_of(labels.fingerprint, cache)?;
        self.refresh()?;
        if let Some(entry) = self.index.lock().covering(&group, tokens, least, capacity) {
            self.folder.touch(&entry.what);
            return Ok(false);
        }
        let saving = face(cache)?;
        let header = write::header_of(saving, labels, Some(rewindable_to))?;
        let bytes = header.data_bytes().saturating_add(header.to_bytes()?.len() as u64);
        if bytes > self.max_bytes {
            debug!(target: TARGET, bytes, most = self.max_bytes, "a text is larger than its folder");
            return Ok(false);
        }
        let name = folder::name_of(&group, tokens);
        write::save(saving, &self.folder.file(&name), &header, tokens)?;
        // It is read from the folder like the files of others.
        self.refresh()?;
        let covered = self.index.lock().covered(&group, tokens, least);
        for name in &covered {
            self.folder.remove(name);
        }
        debug!(target: TARGET, tokens = tokens.len(), bytes, file = name, "a text was stored");
        self.make_room(&name)?;
        Ok(true)
    }

    /// Returns how many of the first tokens of a text a cache like this one could load.
    ///
    /// # Errors
    /// [`InvalidArgument`](Status::InvalidArgument) for an empty fingerprint, and [`File`](Status::File) if
    /// the folder cannot be read.
    pub fn n_stored(&self, cache: &dyn Cache, fingerprint: &str, tokens: &[i64]) -> Result<usize> {
        let matches = self.matches(cache, fingerprint, tokens, 1)?;
        Ok(matches.first().map_or(0, |found| found.n_tokens))
    }

    /// Loads the longest beginning of a text that the folder has. Returns how many of its first tokens
    /// the cache then holds: 0 for none, or [`LEAST_TOKENS`] or more. The host runs the rest. The model
    /// computes logits for what runs only, so it passes the text without its last token.
    ///
    /// A file that is damaged, does not fit, or is gone meanwhile, is passed by.
    ///
    /// # Errors
    /// - [`InvalidArgument`](Status::InvalidArgument) for an empty fingerprint, and if the cache is not
    ///   empty.
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
        for Match { name, n_tokens } in self.matches(cache, fingerprint, tokens, MOST_TRIED)? {
            match self.load_file(cache, fingerprint, &name, &tokens[..n_tokens]) {
                Ok(true) => {
                    self.folder.touch(&name);
                    debug!(target: TARGET, tokens = n_tokens, file = name, "a text was loaded");
                    return Ok(n_tokens);
                }
                Ok(false) => debug!(target: TARGET, file = name, "a stored text does not fit"),
                Err(error) if error.status() == Status::File => {
                    warn!(target: TARGET, %error, file = name, "a stored text is passed by");
                    self.index.lock().give_up(&name);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(0)
    }

    /// Loads a text, and rewinds the cache to `tokens`. Returns `false` for a file that does not fit. The
    /// cache is empty then, and after an error.
    fn load_file(
        &self,
        cache: &mut dyn Cache,
        fingerprint: &str,
        name: &str,
        tokens: &[i64],
    ) -> Result<bool> {
        let file = Opened::new(&self.folder.file(name))?;
        let loading = face(cache)?;
        if loading.planes(&file.header.snapshot).is_err() {
            return Ok(false);
        }
        let found = file.load(loading, fingerprint)?;
        let n = i32::try_from(tokens.len()).unwrap_or(i32::MAX);
        let is_text = |cache: &dyn Cache, n: usize| text_length(cache) == Ok(n as i32);
        let rewound = found.starts_with(tokens)
            && is_text(cache, found.len())
            && cache.rewind(n).is_ok()
            && is_text(cache, tokens.len())
            && cache.formats() == cache.config().formats_at(n);
        if !rewound {
            cache.clear(false)?;
            fail!(File, "the file {name} does not hold the text that it names");
        }
        Ok(true)
    }

    /// Returns some files that hold beginnings of a text, those with the longest first.
    fn matches(
        &self,
        cache: &dyn Cache,
        fingerprint: &str,
        tokens: &[i64],
        most: usize,
    ) -> Result<Vec<Match>> {
        check_fingerprint(fingerprint)?;
        let capacity = usize::try_from(cache.capacity()).unwrap_or_default();
        let group = group_of(fingerprint, cache)?;
        self.refresh()?;
        let index = self.index.lock();
        Ok(index.matches(&group, tokens, LEAST_TOKENS, capacity).take(most).collect())
    }

    /// Reads the beginnings of files that are new, and forgets those that are gone.
    fn refresh(&self) -> Result<()> {
        let found = self.folder.files()?;
        let names: HashSet<&str> = found.iter().map(|file| file.name.as_str()).collect();
        let mut index = self.index.lock();
        index.keep(|name| names.contains(name));
        for file in &found {
            if index.knows(file) {
                continue;
            }
            match Opened::new(&self.folder.file(&file.name)) {
                Ok(Opened { header, tokens, .. }) => index.add(file, Some((&header, tokens)))?,
                // The system may fail in another way the next time.
                Err(error) if error.status() != Status::File || error.source().is_some() => {
                    debug!(target: TARGET, %error, file = file.name, "a stored text was not read");
                }
                Err(error) => {
                    warn!(target: TARGET, %error, file = file.name, "a stored text cannot be used");
                    index.add(file, None)?;
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
            bytes -= file.bytes;
            debug!(target: TARGET, file = file.name, bytes = file.bytes, "a stored text made room");
        }
        Ok(())
    }
}

/// Returns how many positions of one text the cache holds, which is that of sequence 0 from position 0 on.
pub(crate) fn text_length(cache: &dyn Cache) -> Result<i32> {
    let length = cache.next_position()?;
    let others = cache.sequences().map(|all| all.live_sequences()).unwrap_or_default();
    if others.iter().any(|&sequence| sequence != 0) {
        fail!(InvalidArgument, "the cache holds the sequences {others:?}, a text is sequence 0");
    }
    let candidates = cache.trees().map_or(Ok(0), |trees| trees.tree_len(0))?;
    if candidates > 0 {
        fail!(
            InvalidArgument,
            "sequence 0 carries {candidates} candidates; commit or drop them first"
        );
    }
    if cache.length() != length {
        fail!(
            InvalidArgument,
            "the cache holds {} positions up to {length}: some of the text were removed",
            cache.length()
        );
    }
    Ok(length)
}

pub(crate) fn check_fingerprint(fingerprint: &str) -> Result<()> {
    if fingerprint.is_empty() {
        fail!(
            InvalidArgument,
            "the fingerprint is empty: a store holds the texts of several models"
        );
    }
    Ok(())
}
