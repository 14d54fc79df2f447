//! A folder or a bucket of files with the contents of caches, found by their texts.
//!
//! Several processes may use the same folder or bucket. A file appears under its name when it is complete, and never
//! changes. Each call lists the current files.

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
use self::place::{name_of, StorePlace, StoredFile};
use crate::header::Header;
use crate::read::OpenFile;
use crate::{capacity_of, face, model_of, write, Labels};

/// The target of log events.
pub(crate) const TARGET: &str = "etkv::file";

/// The maximum number of files that are tried for a text.
pub(crate) const MAX_TRIED: usize = 8;

/// The minimum number of tokens for which a file is written or read.
pub const MIN_TOKENS: usize = 32;

/// The part of a file before its rows: the header and the token ids.
type Beginning = (Header, Vec<i64>);

/// Prefixes of texts that outlive the process. After a cache has read a text, its contents are stored in a folder or
/// a bucket. A cache whose text begins with the same tokens loads them.
///
/// A file contains a whole cache of one sequence. A cache with the same kind, layers, formats and fingerprint of the
/// model can load it. The cache is then rewound to the length that both texts have in common. Layers with windows can
/// be rewound only a little. Their files are used only for texts that differ near the end, in caches of the same
/// capacity and `max_step_tokens`.
#[derive(Debug)]
pub struct PrefixStore {
    /// The folder, or the address of the bucket.
    path: PathBuf,
    place: Box<dyn StorePlace>,
    max_bytes: u64,
    index: Mutex<Index>,
}

impl PrefixStore {
    /// Opens a folder. If it does not exist, creates it with access for the user only. Removes incomplete files of
    /// killed processes that are an hour old or older.
    ///
    /// With the feature `buckets`, an address such as `s3://bucket/prefix` opens a bucket. Its credentials and
    /// endpoint come from the environment, as read by `from_env` of the crate `object_store`. "Folder" then means the
    /// objects whose names begin with the prefix and a slash.
    ///
    /// Files have at most `max_bytes` bytes in all: [`save`](Self::save) removes the least recently used files. A new
    /// file needs additional space while it is written.
    ///
    /// # Errors
    /// [`File`](Status::File) if the folder cannot be created or read. [`Unsupported`](Status::Unsupported) for an
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

    /// Opens a bucket of the crate `object_store`: the objects whose names begin with `prefix` and a slash, or all
    /// objects if `prefix` is empty.
    ///
    /// # Errors
    /// [`File`](Status::File) if the objects cannot be listed.
    #[cfg(feature = "buckets")]
    pub fn in_bucket(
        bucket: std::sync::Arc<dyn object_store::ObjectStore>,
        prefix: &str,
        max_bytes: u64,
    ) -> Result<Self> {
        let bucket = bucket::Bucket::new(bucket, prefix.into())?;
        Ok(Self::at(PathBuf::from(bucket.to_string()), Box::new(bucket), max_bytes))
    }

    fn at(path: PathBuf, place: Box<dyn StorePlace>, max_bytes: u64) -> Self {
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

    /// Stores the contents of a cache, whose text is `labels.tokens`. Returns whether a file was written. No file is
    /// written if the text is shorter than [`MIN_TOKENS`], is already in the folder, or needs more bytes than the
    /// folder may have. No file is written either if the cache was converted explicitly. Removes files whose texts
    /// are prefixes of this one, if the new file can replace them in every use.
    ///
    /// # Errors
    /// - [`InvalidArgument`](Status::InvalidArgument) for an empty fingerprint, and if the cache does not consist of
    ///   exactly one position for each token, in sequence 0, without candidates.
    /// - Errors of [`save`](crate::save).
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
        // A text shorter than `quantized_kv_start` has other formats, so this file cannot replace its file.
        let converted_at = cache.config().quantized_kv_start.filter(|&start| start <= length);
        let mut reach = cache.reach()?;
        reach.rewindable_to = reach.rewindable_to.max(converted_at.unwrap_or_default());
        reach.checkpoints.retain(|&kept| kept >= converted_at.unwrap_or_default());
        let capacity = capacity_of(cache);
        let group = group_of(labels.fingerprint, cache)?;
        let found = self.refresh(capacity)?;
        let covering = self.index.lock().covering(&group, tokens, &reach, capacity).cloned();
        if let Some(entry) = covering {
            self.touch(&found, &entry.what);
            return Ok(false);
        }
        let saving = face(cache)?;
        let header = write::header_of(saving, labels, Some(reach.rewindable_to))?;
        let bytes = header.data_bytes().saturating_add(header.to_bytes()?.len() as u64);
        if bytes > self.max_bytes {
            debug!(target: TARGET, bytes, most = self.max_bytes, "a text is larger than the limit of its folder");
            return Ok(false);
        }
        let name = name_of(&group, tokens);
        let path = self.path.join(&name);
        self.place
            .put(&name, bytes, &mut |file| write::write(saving, &header, tokens, file, &path))?;
        // Adds the new file to the index, like other files.
        self.refresh(capacity)?;
        let covered = self.index.lock().covered(&group, tokens, &reach);
        for name in &covered {
            self.place.remove(name);
        }
        debug!(target: TARGET, tokens = tokens.len(), bytes, file = name, "a text was stored");
        self.make_room(&name)?;
        Ok(true)
    }

    /// Returns the number of a text's first tokens that a cache with the config of `cache` could load.
    ///
    /// # Errors
    /// [`InvalidArgument`](Status::InvalidArgument) for an empty fingerprint, and [`File`](Status::File) if
    /// the folder cannot be read.
    pub fn n_stored(&self, cache: &dyn Cache, fingerprint: &str, tokens: &[i64]) -> Result<usize> {
        check_fingerprint(fingerprint)?;
        let (_, matches) = self.matches(cache, &model_of(cache, fingerprint), tokens, 1)?;
        Ok(matches.first().map_or(0, |found| found.n_tokens))
    }

    /// Loads the longest stored prefix of a text. Returns the number of the text's tokens that the
    /// cache then has: 0, or at least [`MIN_TOKENS`]. The host runs the rest. The model computes logits only for
    /// tokens that run, so the host should pass the text without its last token.
    ///
    /// Files that are damaged, do not fit or have disappeared are skipped.
    ///
    /// # Errors
    /// - [`InvalidArgument`](Status::InvalidArgument) for an empty fingerprint, and if the cache is not
    ///   empty.
    /// - [`File`](Status::File) if the folder cannot be read.
    /// - [`Step`](Status::Step) while a step is open.
    /// - [`Unsupported`](Status::Unsupported) for a kind of cache or a backend that cannot be loaded.
    /// - [`Backend`](Status::Backend) if the cache is poisoned or there is too little memory.
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
        let group = group_of(&fingerprint, cache)?;
        let common = self.index.lock().common(&group, tokens, capacity_of(cache));
        for Match { name, n_tokens } in matches {
            match self.load_file(cache, &fingerprint, &name, &tokens[..n_tokens]) {
                Ok(true) => {
                    self.touch(&found, &name);
                    debug!(target: TARGET, tokens = n_tokens, file = name, "a text was loaded");
                    mark_parting(cache, n_tokens, common);
                    return Ok(n_tokens);
                }
                Ok(false) => debug!(target: TARGET, file = name, "a stored text does not fit"),
                Err(error) if error.status() == Status::File => {
                    warn!(target: TARGET, %error, file = name, "a stored text is skipped");
                    // An error of the system may be temporary, so the file stays usable.
                    if error.source().is_none() {
                        self.index.lock().give_up(&name);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        mark_parting(cache, 0, common);
        Ok(0)
    }

    /// Loads a text, and rewinds the cache to `tokens`. Returns `false` for a file that does not fit. The cache is
    /// empty in this case and after an error.
    fn load_file(
        &self,
        cache: &mut dyn Cache,
        fingerprint: &str,
        name: &str,
        tokens: &[i64],
    ) -> Result<bool> {
        let most = capacity_of(cache);
        let file =
            self.place.open(name).and_then(|(file, bytes)| OpenFile::new(file, bytes, most))?;
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
            fail!(File, "the file {name} does not contain the text of its name");
        }
        Ok(true)
    }

    /// Returns all files, and the best files for a text. Files that share a longer prefix with the text come first.
    fn matches(
        &self,
        cache: &dyn Cache,
        fingerprint: &str,
        tokens: &[i64],
        most: usize,
    ) -> Result<(Vec<StoredFile>, Vec<Match>)> {
        let capacity = capacity_of(cache);
        let group = group_of(fingerprint, cache)?;
        let found = self.refresh(capacity)?;
        let index = self.index.lock();
        let matches = index.matches(&group, tokens, MIN_TOKENS, capacity, most).collect();
        drop(index);
        Ok((found, matches))
    }

    /// Records that a file was used.
    fn touch(&self, found: &[StoredFile], name: &str) {
        if let Some(file) = found.iter().find(|file| file.name == name) {
            self.place.touch(file);
        }
    }

    /// Reads the headers and token ids of new files, and removes from the index files that no longer exist. Returns
    /// all files. Skips texts longer than `capacity`. They are read when a larger cache needs them.
    fn refresh(&self, capacity: usize) -> Result<Vec<StoredFile>> {
        let found = self.place.files()?;
        let names: HashSet<&str> = found.iter().map(|file| file.name.as_str()).collect();
        let mut index = self.index.lock();
        index.keep(|name| names.contains(name));
        let new: Vec<&StoredFile> =
            found.iter().filter(|file| !index.knows(file, capacity)).collect();
        // Meanwhile, other threads may search, or read the same files.
        drop(index);
        let read = self.beginnings(&new, capacity);
        let mut index = self.index.lock();
        for (file, beginning) in new.into_iter().zip(read) {
            match beginning {
                Ok((header, tokens)) => index.add(file, Some((&header, tokens)))?,
                Err(error) if error.status() == Status::Capacity => index.is_longer(file, capacity),
                // An error of the system may not recur, so the file is read again next time.
                Err(error) if error.status() != Status::File || error.source().is_some() => {
                    debug!(target: TARGET, %error, file = file.name, "cannot read a stored text");
                }
                Err(error) => {
                    warn!(target: TARGET, %error, file = file.name, "cannot use a stored text");
                    index.add(file, None)?;
                }
            }
        }
        drop(index);
        Ok(found)
    }

    /// Returns the headers and token ids of files. Reads several files at once if the place supports it. Texts of
    /// more tokens than `capacity` are not read.
    fn beginnings(&self, files: &[&StoredFile], capacity: usize) -> Vec<Result<Beginning>> {
        let read = |file: &StoredFile| {
            let (source, bytes) = self.place.open(&file.name)?;
            let OpenFile { header, tokens, .. } = OpenFile::new(source, bytes, capacity)?;
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

    /// Removes files, the least recently used first, until the rest fits. Keeps the newest.
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
            debug!(target: TARGET, file = file.name, bytes = file.bytes, "a stored text was removed to make room");
        }
        Ok(())
    }
}

/// Marks the position at which a text diverges from a stored text, unless a loaded cache can be rewound to that
/// position without a mark. The next text that diverges there can then continue from that position.
pub(crate) fn mark_parting(cache: &mut dyn Cache, held: usize, common: usize) {
    if common <= held || cache.config().recurrent_layers.is_empty() {
        return;
    }
    if let Err(error) = cache.mark(i32::try_from(common).unwrap_or(i32::MAX)) {
        debug!(target: TARGET, %error, common, "cannot mark the position where two texts diverge");
    }
}

/// Returns the number of positions of the cache's text, which must be sequence 0 and begin at position 0.
pub(crate) fn text_length(cache: &dyn Cache) -> Result<i32> {
    let length = cache.next_position()?;
    let others = cache.sequences().map(|all| all.live_sequences()).unwrap_or_default();
    if others.iter().any(|&sequence| sequence != 0) {
        fail!(
            InvalidArgument,
            "expected a cache with sequence 0 only, got the sequences {others:?}"
        );
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
            "the cache holds {} positions up to {length}: some positions of the text were removed",
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
