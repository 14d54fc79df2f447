//! Prefixes in memory, found by their texts.

mod ahead;
mod kept;

use std::sync::{Arc, Weak};

use etkv_core::error::fail;
use etkv_core::{Cache, MemoryBudget, Piece, Prefix, Reclaim, ReclaimClass, Result, Status};
use parking_lot::Mutex;
use tracing::{debug, warn};

use self::ahead::{ReadAhead, ReadQueue};
use self::kept::{CachedText, KeptPrefixes};
use crate::store::index::{group_with, Group};
use crate::store::{check_fingerprint, mark_parting, text_length, MAX_TRIED, TARGET};
use crate::{capacity_of, model_of, Labels, PrefixStore};

/// Prefixes of texts that caches of this process share. After a cache has read a text, its rows are kept as a
/// [`Prefix`]. An empty cache whose text begins with the same tokens attaches to the prefix, without a copy.
///
/// A prefix is used by caches with the same backend, layers, formats and fingerprint, up to the length that both
/// texts have in common. Layers with windows can be rewound only a little. Their prefixes are used only for texts
/// that differ near the end, in caches of the same capacity and `max_step_tokens`. Each kind accepts the prefixes of
/// all others; see [`ShareCache::attach`](etkv_core::ShareCache::attach).
///
/// Several threads can use a prefix cache. A clone is a handle of the same prefix cache. The prefixes are dropped with
/// the last handle, but a cache that is attached to a prefix keeps the prefix's rows.
#[derive(Debug, Clone)]
pub struct PrefixCache {
    inner: Arc<Inner>,
    /// The thread ends when the last handle is dropped.
    ahead: Arc<ReadAhead>,
}

/// The limits of a [`PrefixCache`], and the store from which it reads.
#[derive(Debug, Clone, Default)]
pub struct PrefixCacheOptions {
    /// The maximum number of bytes of the rows of prefixes in memory, or no limit. The least recently used prefixes
    /// are removed first. Pinned prefixes stay, even above the limit.
    pub max_bytes: Option<u64>,
    /// A store in which texts that are not in memory are looked up, and to which all kept texts are written.
    pub store: Option<Arc<PrefixStore>>,
}

/// The contents of a [`PrefixCache`], and the number of lookups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PrefixCacheReport {
    /// The number of prefixes in memory.
    pub prefixes: usize,
    /// The bytes of their rows. Rows that several prefixes share count once.
    pub bytes: u64,
    /// The number of pinned prefixes.
    pub pinned: usize,
    /// The number of tokens of all texts passed to `attach`.
    pub tokens_asked: u64,
    /// The number of these tokens that were found in memory.
    pub tokens_in_memory: u64,
    /// The number of these tokens that were loaded from the store.
    pub tokens_in_store: u64,
    /// The number of texts that wait to be [read ahead](PrefixCache::prefetch), including the one that is being read.
    pub ahead_waiting: usize,
    /// The number of texts that were read ahead into memory, at least in part.
    pub ahead_read: u64,
    /// The number of tokens of these texts that were read.
    pub tokens_ahead: u64,
    /// The number of texts that could not be read ahead. The log has the reasons.
    pub ahead_failed: u64,
}

#[derive(Debug)]
struct Inner {
    max_bytes: u64,
    store: Option<Arc<PrefixStore>>,
    /// No prefix may be dropped while this is locked, because a drop may wait for a backend.
    kept: Mutex<KeptPrefixes>,
    /// The texts to read ahead, and the results.
    asked: Mutex<ReadQueue>,
}

/// Pins a prefix: the prefix stays in memory until the pin is dropped.
#[derive(Debug)]
#[must_use = "the prefix is pinned for as long as this lives"]
pub struct Pin {
    inner: Arc<Inner>,
    number: u64,
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut kept = self.inner.kept.lock();
        kept.unpin(self.number);
        let gone = kept.make_room(self.inner.max_bytes, None);
        drop(kept);
        drop(gone);
    }
}

impl PrefixCache {
    /// Returns an empty prefix cache. If the memory budget is full, it [reclaims](Self::reclaim) memory from this
    /// cache.
    pub fn new(options: PrefixCacheOptions) -> Self {
        let PrefixCacheOptions { max_bytes, store } = options;
        let max_bytes = max_bytes.unwrap_or(u64::MAX);
        let (kept, asked) = (Mutex::default(), Mutex::default());
        let inner = Arc::new(Inner { max_bytes, store, kept, asked });
        let reclaimer: Weak<dyn Reclaim> = Arc::<Inner>::downgrade(&inner);
        MemoryBudget::global().add_reclaimer(ReclaimClass::IdlePrefixes, reclaimer);
        let ahead = Arc::new(ReadAhead::of(Arc::clone(&inner)));
        Self { inner, ahead }
    }

    /// Attaches an empty cache to the longest prefix of a text that is in memory. Returns the number of the text's
    /// tokens that the cache then has. The host runs the rest. The model computes logits only for tokens that run, so
    /// the host should pass the text without its last token.
    ///
    /// If the store has a longer prefix, that prefix is loaded into the cache, and is then kept in memory. If the
    /// store fails, it is skipped, with a warning in the log.
    ///
    /// # Errors
    /// - [`InvalidArgument`](Status::InvalidArgument) for an empty fingerprint, and if the cache is not empty.
    /// - [`Unsupported`](Status::Unsupported) for a kind that cannot share memory.
    /// - [`Step`](Status::Step) while a step is open.
    /// - [`Backend`](Status::Backend) if the cache is poisoned or there is too little memory.
    pub fn attach(
        &self,
        cache: &mut dyn Cache,
        fingerprint: &str,
        tokens: &[i64],
    ) -> Result<usize> {
        let group = group_of(fingerprint, cache)?;
        if cache.length() > 0 {
            fail!(
                InvalidArgument,
                "the cache holds {} positions; clear it before it is attached",
                cache.length()
            );
        }
        let found = self.inner.kept.lock().matches(&group, tokens, capacity_of(cache), MAX_TRIED);
        let in_memory = found.first().map_or(0, |(n, ..)| *n);
        let mut counted = [0, 0];
        // If the text was read ahead recently, the store has no more of it than memory. Otherwise the store is queried
        // without holding the lock, because `prefetch` would wait for the lock.
        let was_read = self.inner.asked.lock().has(&group, tokens, in_memory);
        let in_store = match was_read {
            true => 0,
            false => self.inner.in_store(cache, fingerprint, tokens, in_memory),
        };
        let mut n = 0;
        if in_store > in_memory {
            n = self.inner.load(cache, fingerprint, tokens)?;
            counted[1] = n;
        }
        if n > 0 {
            // Keeps the loaded text in memory. If this fails, the cache still has the text.
            if let Err(error) = self.inner.keep(cache, &group, &tokens[..n]) {
                debug!(target: TARGET, %error, "cannot share a loaded text");
            }
        } else {
            n = self.attach_to(cache, found)?;
            counted[0] = n;
        }
        let common = self.inner.kept.lock().common(&group, tokens, capacity_of(cache));
        mark_parting(cache, n, common);
        debug!(target: TARGET, tokens = tokens.len(), attached = n, loaded = counted[1], "attached");
        self.inner.kept.lock().count(tokens.len(), counted);
        Ok(n)
    }

    /// Keeps the contents of a cache, whose text is `tokens`. The cache itself then continues from the kept prefix.
    /// Returns whether memory then has the text. It lacks the text if the text needs more than the allowed bytes, or if
    /// the cache was converted explicitly. Removes texts that are prefixes of this one, if this one can replace them in
    /// every use.
    ///
    /// The text is also written to the store, if there is one: **the file contains the users' text**. If the store
    /// fails, it is skipped, with a warning in the log.
    ///
    /// # Errors
    /// - [`InvalidArgument`](Status::InvalidArgument) for an empty fingerprint or no tokens. Also if the cache does
    ///   not consist of exactly one position for each token, in sequence 0, without candidates.
    /// - Errors of [`ShareCache::freeze`](etkv_core::ShareCache::freeze).
    ///
    /// After an error the cache is unchanged.
    pub fn keep(&self, cache: &mut dyn Cache, fingerprint: &str, tokens: &[i64]) -> Result<bool> {
        let group = group_of(fingerprint, cache)?;
        let length = text_length(cache)?;
        if tokens.is_empty() || usize::try_from(length).ok() != Some(tokens.len()) {
            fail!(
                InvalidArgument,
                "the cache holds {length} positions, and the text has {} tokens",
                tokens.len()
            );
        }
        let kept = match self.inner.keep(cache, &group, tokens) {
            // The text can still be written to the store.
            Err(error) if error.status() == Status::Unsupported && self.inner.store.is_some() => {
                debug!(target: TARGET, %error, "a text is only in the store");
                false
            }
            kept => kept?,
        };
        if let Some(store) = &self.inner.store {
            if let Err(error) = store.save(cache, Labels { fingerprint, tokens }) {
                warn!(target: TARGET, %error, "the prefix store is skipped");
            }
        }
        Ok(kept)
    }

    /// Returns the number of a text's first tokens that an empty cache with the config of `cache` could get from
    /// memory or the store.
    ///
    /// # Errors
    /// - [`InvalidArgument`](Status::InvalidArgument) for an empty fingerprint.
    /// - [`Unsupported`](Status::Unsupported) for a kind that cannot share memory.
    pub fn n_kept(
        &self,
        cache: &mut dyn Cache,
        fingerprint: &str,
        tokens: &[i64],
    ) -> Result<usize> {
        let group = group_of(fingerprint, cache)?;
        let in_memory = self.inner.in_memory(cache, &group, tokens);
        Ok(in_memory.max(self.inner.in_store(cache, fingerprint, tokens, in_memory)))
    }

    /// Reads the longest prefix of a text in the store into memory, on a thread of this prefix cache. A cache with
    /// the config of `cache` can later [`attach`](Self::attach) to it. Does not wait, and accesses neither the folder
    /// nor the network. Returns whether the text was queued. A text is not queued if memory has all of it, if there
    /// is no store, or if too many texts wait. It is not queued either if the cache [cannot
    /// create](Cache::make_empty) another cache.
    ///
    /// The result is a prefix like others: it counts for `max_bytes` and the memory budget, and may be removed as the
    /// least recently used. Texts that cannot be read, for example because there is too little memory, are counted in
    /// the [report](Self::report). For a minute after a text was read, `attach` does not query the store for that
    /// text, as long as the text is in memory.
    ///
    /// Dropping the last handle of the prefix cache waits until the current text has been read.
    ///
    /// # Errors
    /// - [`InvalidArgument`](Status::InvalidArgument) for an empty fingerprint.
    /// - [`Unsupported`](Status::Unsupported) for a kind that cannot share memory.
    /// - [`Backend`](Status::Backend) if the thread cannot be started.
    pub fn prefetch(
        &self,
        cache: &mut dyn Cache,
        fingerprint: &str,
        tokens: &[i64],
    ) -> Result<bool> {
        let group = group_of(fingerprint, cache)?;
        let in_memory = self.inner.in_memory(cache, &group, tokens);
        if self.inner.store.is_none() || in_memory == tokens.len() {
            return Ok(false);
        }
        let Some(empty) = cache.make_empty()? else { return Ok(false) };
        self.ahead.read(empty, group, fingerprint, tokens, in_memory)
    }

    /// Pins a prefix with a complete text, for caches with the config of `cache`: the prefix stays in memory as long as
    /// the pin lives.
    ///
    /// # Errors
    /// - [`InvalidArgument`](Status::InvalidArgument) for an empty fingerprint, and if no prefix has the text.
    /// - [`Unsupported`](Status::Unsupported) for a kind that cannot share memory.
    pub fn pin(&self, cache: &mut dyn Cache, fingerprint: &str, tokens: &[i64]) -> Result<Pin> {
        let group = group_of(fingerprint, cache)?;
        match self.inner.kept.lock().pin(&group, tokens, capacity_of(cache)) {
            Some(number) => Ok(Pin { inner: Arc::clone(&self.inner), number }),
            None => fail!(
                InvalidArgument,
                "no prefix in memory has this text of {} tokens; keep it first",
                tokens.len()
            ),
        }
    }

    /// Frees prefixes that are not pinned and that no cache uses, the least recently used first, until `bytes` bytes
    /// are free. Returns the number of freed bytes.
    ///
    /// May wait until no other thread uses a backend. The caller must not hold a lock for which such a thread may
    /// wait.
    pub fn reclaim(&self, bytes: u64) -> u64 {
        self.inner.reclaim(bytes)
    }

    /// Drops all prefixes that are not pinned. The files of the store stay.
    pub fn clear(&self) {
        // The prefixes are dropped without the lock, because the drop takes long and other calls need the lock.
        let gone = self.inner.kept.lock().clear();
        drop(gone);
    }

    /// Returns the contents and the number of lookups.
    pub fn report(&self) -> PrefixCacheReport {
        let mut report = self.inner.kept.lock().report();
        self.inner.asked.lock().add_to(&mut report);
        report
    }

    /// Returns the store from which the prefix cache reads, if there is one.
    pub fn store(&self) -> Option<&Arc<PrefixStore>> {
        self.inner.store.as_ref()
    }

    /// Attaches a cache to the first of these prefixes that fits it.
    fn attach_to(&self, cache: &mut dyn Cache, found: Vec<(usize, u64, Prefix)>) -> Result<usize> {
        for (n, number, prefix) in found {
            let length = i32::try_from(n).unwrap_or(i32::MAX);
            let Some(face) = cache.sharing() else { return Ok(0) };
            match face.attach(&prefix, length) {
                Ok(()) => {
                    self.inner.kept.lock().touch(number);
                    return Ok(n);
                }
                // For example, a contiguous cache requires cells in order, and the cells of this prefix are not.
                Err(error) if error.status() == Status::InvalidArgument => {
                    debug!(target: TARGET, %error, "a prefix does not fit");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(0)
    }
}

impl Inner {
    /// Returns the length of the longest prefix of the text in memory.
    fn in_memory(&self, cache: &dyn Cache, group: &Group, tokens: &[i64]) -> usize {
        let found = self.kept.lock().matches(group, tokens, capacity_of(cache), 1);
        found.first().map_or(0, |(n, ..)| *n)
    }

    /// Returns the length of the prefix in the store. Queries the store only if it may have a longer prefix than
    /// memory.
    fn in_store(
        &self,
        cache: &dyn Cache,
        fingerprint: &str,
        tokens: &[i64],
        in_memory: usize,
    ) -> usize {
        let Some(store) = self.store.as_ref().filter(|_| tokens.len() > in_memory) else {
            return 0;
        };
        store.n_stored(cache, fingerprint, tokens).unwrap_or_else(|error| {
            warn!(target: TARGET, %error, "the prefix store is skipped");
            0
        })
    }

    /// Loads the text from the store. If nothing was loaded, the cache is empty.
    fn load(&self, cache: &mut dyn Cache, fingerprint: &str, tokens: &[i64]) -> Result<usize> {
        let Some(store) = &self.store else { return Ok(0) };
        match store.load(cache, fingerprint, tokens) {
            Ok(n) => Ok(n),
            Err(error) if matches!(error.status(), Status::File | Status::Unsupported) => {
                warn!(target: TARGET, %error, "the prefix store is skipped");
                Ok(0)
            }
            Err(error) => Err(error),
        }
    }

    /// Freezes a cache with a text, unless memory already has the text.
    fn keep(&self, cache: &mut dyn Cache, group: &Group, tokens: &[i64]) -> Result<bool> {
        let length = cache.length();
        if cache.formats() != cache.config().formats_at(length) {
            return Ok(false);
        }
        // A text shorter than `quantized_kv_start` has other formats, so this longer prefix cannot replace it.
        let converted_at = cache.config().quantized_kv_start.filter(|&start| start <= length);
        let mut reach = cache.reach()?;
        reach.rewindable_to = reach.rewindable_to.max(converted_at.unwrap_or_default());
        reach.checkpoints.retain(|&kept| kept >= converted_at.unwrap_or_default());
        let capacity = capacity_of(cache);
        if self.kept.lock().has(group, tokens, &reach, capacity) {
            return Ok(true);
        }
        let memory = cache.memory();
        if memory.used.saturating_add(memory.shared) > self.max_bytes {
            return Ok(false);
        }
        let Some(face) = cache.sharing() else { return Ok(false) };
        let prefix = face.freeze()?;
        let texted = CachedText { group, tokens, reach: &reach, capacity };
        let max_bytes = self.max_bytes;
        let (is_kept, gone) = self.kept.lock().insert(texted, prefix, max_bytes);
        drop(gone);
        Ok(is_kept)
    }
}

impl Reclaim for Inner {
    fn reclaim(&self, bytes: u64) -> u64 {
        let mut freed: u64 = 0;
        while freed < bytes {
            let idle = self.kept.lock().take_idle(bytes - freed);
            if idle.is_empty() {
                break;
            }
            // Several prefixes may share a piece.
            let mut pieces: Vec<Piece> =
                idle.iter().flat_map(|prefix| prefix.pieces().to_vec()).collect();
            drop(idle);
            pieces.sort_unstable_by_key(Piece::id);
            pieces.dedup_by_key(|piece| piece.id());
            for piece in pieces.iter().filter(|piece| piece.is_freed()) {
                freed = freed.saturating_add(piece.bytes());
            }
        }
        freed
    }
}

/// Returns the group of a cache's texts. Caches of all kinds of a backend can share their contents.
fn group_of(fingerprint: &str, cache: &mut dyn Cache) -> Result<Group> {
    check_fingerprint(fingerprint)?;
    let backend = match cache.sharing() {
        Some(face) => face.backend(),
        None => fail!(Unsupported, "caches of kind `{}` cannot share memory", cache.kind()),
    };
    group_with(&model_of(cache, fingerprint), backend, cache)
}
