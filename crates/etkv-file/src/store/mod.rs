//! A folder or a bucket of files, by the texts whose keys and values they hold.
//!
//! Any number of processes may use it. A file appears under its name when it is complete, and is
//! never changed. Each call looks at what is there.

#[cfg(feature = "buckets")]
mod bucket;
mod folder;
pub(crate) mod index;
mod place;
pub(crate) mod texts;

use std::collections::HashSet;
use std::error::Error as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use etkv_core::error::fail;
use etkv_core::{Cache, Result, Status};
use parking_lot::Mutex;
use tracing::{debug, warn};

use self::folder::Folder;
use self::index::{group_of, Index, Match};
use self::place::{name_of, Found, Place};
pub use self::place::{ReadSeek, WriteFile};
use crate::header::Header;
use crate::read::Opened;
use crate::{capacity_of, face, model_of, write, Labels};

/// The target of log events.
pub(crate) const TARGET: &str = "etkv::file";

/// The most files that are tried for a text.
pub(crate) const MAX_TRIED: usize = 8;

/// The fewest tokens that are stored, and that are worth reading a file for.
pub const MIN_TOKENS: usize = 32;

/// What a file has before its rows.
type Beginning = (Header, Vec<i64>);

/// Beginnings of texts that outlive the process: what a cache has read of a text is stored in a folder or a
/// bucket, and a cache that is to read a text that begins alike loads it.
///
/// A file holds a whole cache of one sequence. Another cache loads it if it has the same kind, layers and
/// formats, and if the model's fingerprint is the same, and is then rewound to what both texts have in
/// common. Layers with windows can be rewound a little only, so their files serve texts that go on near
/// their end, in caches of the same capacity and `max_step_tokens`.
#[derive(Debug)]
pub struct PrefixStore {
    /// The folder, or the address of the bucket.
    path: PathBuf,
    place: Box<dyn Place>,
    max_bytes: u64,
    index: Mutex<Index>,
}

impl PrefixStore {
    /// Opens a folder, which is made if it is not there, for the user alone. Removes what a process left
    /// there that was killed while it wrote, an hour ago or longer.
    ///
    /// An address such as `s3://bucket/prefix` is that of a bucket, with the feature `buckets`. The environment
    /// has its credentials and its endpoint, as `from_env` of the crate `object_store` reads them. What is called
    /// a folder here is then the objects whose names begin with the prefix and a slash.
    ///
    /// Files take `max_bytes` at most: [`save`](Self::save) removes those that were used least recently. The
    /// new file is there besides while it is written.
    ///
    /// # Errors
    /// [`File`](Status::File) if the folder cannot be made or read. [`Unsupported`](Status::Unsupported) for an
    /// address without the feature `buckets`.
    pub fn open(folder: &Path, max_bytes: u64) -> Result<Self> {
        if let Some(address) = folder.to_str().filter(|path| is_address(path)) {
            return Self::open_bucket(address, max_bytes);
        }
        Ok(Self::at(folder.to_owned(), Box::new(Folder::open(folder)?), max_bytes))
    }

    #[cfg(feature = "buckets")]
    fn open_bucket(address: &str, max_bytes: u64) -> Result<Self> {
        let bucket = bucket::Bucket::open(address)?;
        Ok(Self::at(PathBuf::from(address), Box::new(bucket), max_bytes))
    }

    #[cfg(not(feature = "buckets"))]
    fn open_bucket(address: &str, _: u64) -> Result<Self> {
        fail!(
            Unsupported,
            "cannot open {address}: this library is built without buckets; build it with ETKV_BUCKETS=ON (CMake) or \
             the feature `buckets` (Cargo)"
        );
    }

    /// Opens a bucket by the means of the crate `object_store`: the objects whose names begin with `prefix` and
    /// a slash, or all if it is empty.
    ///
    /// # Errors
    /// [`File`](Status::File) if they cannot be listed.
    #[cfg(feature = "buckets")]
    pub fn in_bucket(
        bucket: std::sync::Arc<dyn object_store::ObjectStore>,
        prefix: &str,
        max_bytes: u64,
    ) -> Result<Self> {
        let bucket = bucket::Bucket::new(bucket, prefix.into())?;
        Ok(Self::at(PathBuf::from(bucket.to_string()), Box::new(bucket), max_bytes))
    }

    fn at(path: PathBuf, place: Box<dyn Place>, max_bytes: u64) -> Self {
        Self { path, place, max_bytes, index: Mutex::default() }
    }

    /// Returns the folder, or the address of the bucket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of files in the folder, and their bytes.
    ///
    /// # Errors
    /// [`File`](Status::File) if the folder cannot be read.
    pub fn usage(&self) -> Result<(usize, u64)> {
        let found = self.place.files()?;
        Ok((found.len(), found.iter().map(|file| file.bytes).sum()))
    }

    /// Stores the contents of a cache, which are those of the text `labels.tokens`. Returns whether a file
    /// was written. None is for a text that is shorter than [`MIN_TOKENS`], that the folder has already,
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
        let fingerprint = model_of(cache, labels.fingerprint);
        let labels = Labels { fingerprint: &fingerprint, tokens };
        let length = text_length(cache)?;
        if usize::try_from(length).ok() != Some(tokens.len()) {
            fail!(
                InvalidArgument,
                "the cache holds {length} positions, and the text has {} tokens",
                tokens.len()
            );
        }
        let formats = cache.config().formats_at(length);
        if tokens.len() < MIN_TOKENS || cache.formats() != formats {
            return Ok(false);
        }
        // A text that is still shorter than where rows are converted has other formats.
        let converted_at = cache.config().quantized_kv_start.filter(|&start| start <= length);
        let rewindable_to = cache.rewindable_to()?.max(converted_at.unwrap_or_default());
        let least = usize::try_from(rewindable_to).unwrap_or_default();
        let capacity = capacity_of(cache);
        let group = group_of(labels.fingerprint, cache)?;
        let found = self.refresh(capacity)?;
        let covering = self.index.lock().covering(&group, tokens, least, capacity).cloned();
        if let Some(entry) = covering {
            self.touch(&found, &entry.what);
            return Ok(false);
        }
        let saving = face(cache)?;
        let header = write::header_of(saving, labels, Some(rewindable_to))?;
        let bytes = header.data_bytes().saturating_add(header.to_bytes()?.len() as u64);
        if bytes > self.max_bytes {
            debug!(target: TARGET, bytes, most = self.max_bytes, "a text is larger than its folder");
            return Ok(false);
        }
        let name = name_of(&group, tokens);
        let path = self.path.join(&name);
        self.place
            .put(&name, bytes, &mut |file| write::write(saving, &header, tokens, file, &path))?;
        // It is read from the folder like the files of others.
        self.refresh(capacity)?;
        let covered = self.index.lock().covered(&group, tokens, least);
        for name in &covered {
            self.place.remove(name);
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
        check_fingerprint(fingerprint)?;
        let (_, matches) = self.matches(cache, &model_of(cache, fingerprint), tokens, 1)?;
        Ok(matches.first().map_or(0, |found| found.n_tokens))
    }

    /// Loads the longest beginning of a text that the folder has. Returns how many of its first tokens
    /// the cache then holds: 0 for none, or [`MIN_TOKENS`] or more. The host runs the rest. The model
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
        check_fingerprint(fingerprint)?;
        let fingerprint = model_of(cache, fingerprint);
        let (found, matches) = self.matches(cache, &fingerprint, tokens, MAX_TRIED)?;
        for Match { name, n_tokens } in matches {
            match self.load_file(cache, &fingerprint, &name, &tokens[..n_tokens]) {
                Ok(true) => {
                    self.touch(&found, &name);
                    debug!(target: TARGET, tokens = n_tokens, file = name, "a text was loaded");
                    return Ok(n_tokens);
                }
                Ok(false) => debug!(target: TARGET, file = name, "a stored text does not fit"),
                Err(error) if error.status() == Status::File => {
                    warn!(target: TARGET, %error, file = name, "a stored text is passed by");
                    // The system may fail in another way the next time.
                    if error.source().is_none() {
                        self.index.lock().give_up(&name);
                    }
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
        let most = capacity_of(cache);
        let file =
            self.place.open(name).and_then(|(file, bytes)| Opened::new(file, bytes, most))?;
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

    /// Returns all files, and some that hold beginnings of a text, those with the longest first.
    fn matches(
        &self,
        cache: &dyn Cache,
        fingerprint: &str,
        tokens: &[i64],
        most: usize,
    ) -> Result<(Vec<Found>, Vec<Match>)> {
        let capacity = capacity_of(cache);
        let group = group_of(fingerprint, cache)?;
        let found = self.refresh(capacity)?;
        let index = self.index.lock();
        let matches = index.matches(&group, tokens, MIN_TOKENS, capacity).take(most).collect();
        drop(index);
        Ok((found, matches))
    }

    /// Notes that one of these files is used.
    fn touch(&self, found: &[Found], name: &str) {
        if let Some(file) = found.iter().find(|file| file.name == name) {
            self.place.touch(file);
        }
    }

    /// Reads the beginnings of files that are new, and forgets those that are gone. Returns all. What a cache of this
    /// capacity could not hold is left for a larger one.
    fn refresh(&self, capacity: usize) -> Result<Vec<Found>> {
        let found = self.place.files()?;
        let names: HashSet<&str> = found.iter().map(|file| file.name.as_str()).collect();
        let mut index = self.index.lock();
        index.keep(|name| names.contains(name));
        let new: Vec<&Found> = found.iter().filter(|file| !index.knows(file, capacity)).collect();
        // Other threads search while this one reads. They may read the same files.
        drop(index);
        let read = self.beginnings(&new, capacity);
        let mut index = self.index.lock();
        for (file, beginning) in new.into_iter().zip(read) {
            match beginning {
                Ok((header, tokens)) => index.add(file, Some((&header, tokens)))?,
                Err(error) if error.status() == Status::Capacity => index.is_longer(file, capacity),
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
        drop(index);
        Ok(found)
    }

    /// Returns the beginnings of files, several read at once where the place asks for it. Those of texts of more
    /// tokens than `capacity` are not read.
    fn beginnings(&self, files: &[&Found], capacity: usize) -> Vec<Result<Beginning>> {
        let read = |file: &Found| {
            let (source, bytes) = self.place.open(&file.name)?;
            let Opened { header, tokens, .. } = Opened::new(source, bytes, capacity)?;
            Ok((header, tokens))
        };
        let n_threads = self.place.at_once().min(files.len());
        if n_threads < 2 {
            return files.iter().map(|file| read(file)).collect();
        }
        let next = AtomicUsize::new(0);
        let all: Mutex<Vec<(usize, Result<Beginning>)>> = Mutex::default();
        std::thread::scope(|scope| {
            for _ in 0..n_threads {
                scope.spawn(|| loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(file) = files.get(at) else { return };
                    let beginning = read(file);
                    all.lock().push((at, beginning));
                });
            }
        });
        let mut all = all.into_inner();
        all.sort_unstable_by_key(|(at, _)| *at);
        all.into_iter().map(|(_, beginning)| beginning).collect()
    }

    /// Removes files, those that were used least recently first, until the rest fits. Keeps the newest.
    fn make_room(&self, newest: &str) -> Result<()> {
        let mut files = self.place.files()?;
        files.sort_unstable_by_key(|file| (file.name == newest, file.used));
        let mut bytes: u64 = files.iter().map(|file| file.bytes).sum();
        for file in files.iter().filter(|file| file.name != newest) {
            if bytes <= self.max_bytes {
                break;
            }
            self.place.remove(&file.name);
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

/// Returns whether a path is an address with a scheme, such as `s3://bucket`.
fn is_address(path: &str) -> bool {
    path.split_once("://").is_some_and(|(scheme, _)| {
        scheme.len() > 1
            && scheme.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
    })
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
