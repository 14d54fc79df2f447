//! Saves the contents of a cache to a file, and loads them.
//!
//! A file is a safetensors file. It contains the planes of every layer's keys and values in the stored format, the
//! token ids of the caller, and checksums. Its metadata has the version of this format, the model's fingerprint and
//! the integers of the cache. docs/saving.md describes it.
//!
//! A [`PrefixStore`] is a folder or a bucket of such files, found by their texts. A [`PrefixCache`] keeps prefixes of
//! texts in memory, which caches share.
//!
//! This crate is independent of backends: a cache of one backend can read a file of another backend's cache.
#![forbid(unsafe_code)]

mod checksum;
mod fingerprint;
mod header;
mod io;
mod prefix_cache;
mod read;
mod store;
mod write;

use std::borrow::Cow;
use std::path::Path;

use etkv_core::error::fail;
use etkv_core::{Cache, Result, SaveCache};

pub use fingerprint::fingerprint;
pub use header::{MAX_HEADER, VERSION};
pub use prefix_cache::{Pin, PrefixCache, PrefixCacheOptions, PrefixCacheReport};
pub use store::{PrefixStore, MIN_TOKENS};

/// The caller's data that is saved with the contents of a cache.
#[derive(Debug, Clone, Copy, Default)]
pub struct Labels<'a> {
    /// The name by which the caller distinguishes models, such as the [`fingerprint`] of the program. A file can only
    /// be loaded with the fingerprint with which it was saved.
    pub fingerprint: &'a str,
    /// Token ids, which are not interpreted. Their number may exceed the capacity of the cache by at most 65,536.
    pub tokens: &'a [i64],
}

/// Writes the contents of a cache to a file, first under a temporary name. An older file with this name remains until
/// the new file is complete and on the disk.
///
/// The cache does not change, except that a step that was set aside is rolled back.
///
/// # Errors
/// - [`File`](etkv_core::Status::File) if the file cannot be written, or `path` is a folder, a device, a pipe or a
///   socket. An older file is unchanged.
/// - [`InvalidArgument`](etkv_core::Status::InvalidArgument) for too many token ids.
/// - [`Step`](etkv_core::Status::Step) while a step is open.
/// - [`Unsupported`](etkv_core::Status::Unsupported) for a kind of cache or a backend that cannot be saved.
/// - [`Backend`](etkv_core::Status::Backend) if the cache is poisoned or there is too little memory.
pub fn save(cache: &mut dyn Cache, path: &Path, labels: Labels) -> Result<()> {
    let rewindable_to = cache.rewindable_to().ok();
    let fingerprint = model_of(cache, labels.fingerprint);
    let labels = Labels { fingerprint: &fingerprint, ..labels };
    check_tokens(cache, labels.tokens)?;
    let saving = face(cache)?;
    let header = write::header_of(saving, labels, rewindable_to)?;
    write::save(saving, path, &header, labels.tokens)
}

/// Replaces the contents of a cache by those of a file, and returns the token ids of the file. The old and the new
/// contents are both in memory until the new contents are complete.
///
/// A file fits if it was saved from a cache of the same kind with the same layers and windows. If the formats in its
/// config are also the same, the cache continues as the saved cache would have. Otherwise, float formats are
/// converted to the formats of the cache, and other formats are refused.
///
/// # Errors
/// - [`File`](etkv_core::Status::File) if the file cannot be read, is damaged, or has another version, model or
///   config. In a cache whose sequences share cells, also if the file has values that are not finite.
/// - [`Capacity`](etkv_core::Status::Capacity) for more token ids than a file of this cache may have.
/// - [`Step`](etkv_core::Status::Step) while a step is open.
/// - [`Unsupported`](etkv_core::Status::Unsupported) for a kind of cache or a backend that cannot be loaded.
/// - [`Backend`](etkv_core::Status::Backend) if the cache is poisoned or there is too little memory.
///
/// After an error the contents are unchanged.
pub fn load(cache: &mut dyn Cache, path: &Path, fingerprint: &str) -> Result<Vec<i64>> {
    let fingerprint = model_of(cache, fingerprint);
    let most = max_token_ids(cache);
    read::load(face(cache)?, path, &fingerprint, most)
}

/// Writes one sequence of a cache with several sequences to a file, as [`save`] does. The file is like a file of a
/// cache that has only this sequence, as sequence 0.
///
/// # Errors
/// Errors of [`save`], and [`InvalidArgument`](etkv_core::Status::InvalidArgument) for a sequence number out of range,
/// and for a sequence without positions or with candidates.
pub fn save_sequence(
    cache: &mut dyn Cache,
    sequence: i32,
    path: &Path,
    labels: Labels,
) -> Result<()> {
    let rewindable_to = cache.sequences().map(|all| all.seq_rewindable_to(sequence)).transpose()?;
    let fingerprint = model_of(cache, labels.fingerprint);
    let labels = Labels { fingerprint: &fingerprint, ..labels };
    check_tokens(cache, labels.tokens)?;
    let mut saving = sequence_face(cache, sequence)?;
    let header = write::header_of(&mut *saving, labels, rewindable_to)?;
    write::save(&*saving, path, &header, labels.tokens)
}

/// Adds the only sequence of a file to a cache with several sequences, under an unused number. Returns the token ids
/// of the file. Everything is checked before the cache changes, and other sequences do not change. Until the rows of
/// the sequence are complete, they are in memory twice.
///
/// A file fits if [`save_sequence`] or [`save`] wrote it from a cache with the same layers and windows, of any kind,
/// and if it has one sequence without candidates. Rows get the cache's current formats: float formats are converted
/// into each other, and other formats are refused.
///
/// # Errors
/// - [`InvalidArgument`](etkv_core::Status::InvalidArgument) for a sequence number out of range, and for a sequence
///   that already has positions or candidates.
/// - [`Capacity`](etkv_core::Status::Capacity) if the sequence does not fit next to the others.
/// - [`File`](etkv_core::Status::File) if the file cannot be read, is damaged, or has another version, model or
///   config. Also if the file has values that are not finite, because other sequences would read them.
/// - [`Step`](etkv_core::Status::Step) while a step is open.
/// - [`Unsupported`](etkv_core::Status::Unsupported) for a kind with one sequence, and for a kind or a backend that
///   cannot be loaded.
/// - [`Backend`](etkv_core::Status::Backend) if the cache is poisoned or there is too little memory.
///
/// After an error the contents are unchanged.
pub fn load_sequence(
    cache: &mut dyn Cache,
    sequence: i32,
    path: &Path,
    fingerprint: &str,
) -> Result<Vec<i64>> {
    let fingerprint = model_of(cache, fingerprint);
    let most = max_token_ids(cache);
    read::load(&mut *sequence_face(cache, sequence)?, path, &fingerprint, most)
}

/// Returns the checksum of a header, for tests that create files.
#[doc(hidden)]
pub fn checksum(bytes: &[u8]) -> [u8; checksum::BYTES] {
    checksum::of(bytes)
}

/// Returns the name of the model that wrote the rows of a cache. The name consists of the fingerprint and of the
/// limits that the capacity of the cache exceeds: the program writes other rows if the capacity exceeds a limit.
fn model_of<'a>(cache: &dyn Cache, fingerprint: &'a str) -> Cow<'a, str> {
    match cache.passed_limits() {
        [] => Cow::Borrowed(fingerprint),
        limits => {
            let limits: Vec<String> = limits.iter().map(i32::to_string).collect();
            Cow::Owned(format!("{fingerprint} with a capacity over {}", limits.join(" and ")))
        }
    }
}

/// The number of token ids that a file may have in addition to one for each position of the cache.
const MORE_TOKENS: usize = 1 << 16;

/// Returns the maximum number of token ids that a cache's file may have.
fn max_token_ids(cache: &dyn Cache) -> usize {
    capacity_of(cache).saturating_add(MORE_TOKENS)
}

fn capacity_of(cache: &dyn Cache) -> usize {
    usize::try_from(cache.capacity()).unwrap_or_default()
}

fn check_tokens(cache: &dyn Cache, tokens: &[i64]) -> Result<()> {
    let (n, most) = (tokens.len(), max_token_ids(cache));
    if n > most {
        fail!(
            InvalidArgument,
            "{n} token ids, the maximum for a cache with a capacity of {} is {most}",
            cache.capacity()
        );
    }
    Ok(())
}

fn face(cache: &mut dyn Cache) -> Result<&mut dyn SaveCache> {
    let kind = cache.kind().to_owned();
    match cache.saving() {
        Some(face) => Ok(face),
        None => fail!(Unsupported, "caches of kind `{kind}` cannot be saved or loaded"),
    }
}

fn sequence_face(cache: &mut dyn Cache, sequence: i32) -> Result<Box<dyn SaveCache + '_>> {
    let kind = cache.kind().to_owned();
    match cache.saving_sequence(sequence) {
        Some(face) => Ok(face),
        None => fail!(
            Unsupported,
            "single sequences can be saved and loaded in caches of kinds `seq` and `tree`, not of kind `{kind}`"
        ),
    }
}
