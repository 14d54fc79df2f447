//! Where a runner's cache and a program meet, by key; and who makes which kind.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use dashmap::{DashMap, Entry as Place};

use crate::config::CacheConfig;
use crate::error::{fail, Error, Result, Status};
use crate::shared::SharedCache;

/// Makes a cache of one kind.
pub type Builder = Arc<dyn Fn(CacheConfig) -> Result<SharedCache> + Send + Sync>;

/// Makes caches by backend id and kind.
///
/// A new kind registers itself; nothing here changes. A builder may use the registry
/// itself: it is called, and dropped, while no part of the registry is locked.
pub struct BuilderRegistry {
    builders: DashMap<(String, String), Builder>,
}

impl BuilderRegistry {
    /// The registry of this process. It is empty until backends register their kinds.
    pub fn global() -> &'static Self {
        static GLOBAL: LazyLock<BuilderRegistry> =
            LazyLock::new(|| BuilderRegistry { builders: DashMap::new() });
        &GLOBAL
    }

    /// Registers a kind, in place of what was there. Caches that were made already
    /// stay what they are.
    pub fn register(
        &self,
        backend_id: &str,
        kind: &str,
        builder: impl Fn(CacheConfig) -> Result<SharedCache> + Send + Sync + 'static,
    ) {
        let key = (backend_id.to_owned(), kind.to_owned());
        // What was there comes out, and is dropped outside the lock.
        drop(self.builders.insert(key, Arc::new(builder)));
    }

    /// As [`register`](Self::register), where there is no such kind yet.
    ///
    /// # Errors
    /// [`InvalidArgument`](Status::InvalidArgument) where there is.
    pub fn register_new(
        &self,
        backend_id: &str,
        kind: &str,
        builder: impl Fn(CacheConfig) -> Result<SharedCache> + Send + Sync + 'static,
    ) -> Result<()> {
        let key = (backend_id.to_owned(), kind.to_owned());
        let builder: Builder = Arc::new(builder);
        match self.builders.entry(key) {
            Place::Occupied(_) => {
                fail!(InvalidArgument, "there are caches of kind `{kind}` for `{backend_id}`")
            }
            Place::Vacant(place) => {
                place.insert(builder);
                Ok(())
            }
        }
    }

    /// Whether caches of this kind can be made.
    pub fn knows(&self, backend_id: &str, kind: &str) -> bool {
        self.builders.contains_key(&(backend_id.to_owned(), kind.to_owned()))
    }

    /// Makes a cache of this kind.
    ///
    /// # Errors
    /// [`Kind`](Status::Kind) for an unknown kind, and the builder's own.
    pub fn build(&self, backend_id: &str, kind: &str, config: CacheConfig) -> Result<SharedCache> {
        let key = (backend_id.to_owned(), kind.to_owned());
        let builder = self.builders.get(&key).map(|found| Builder::clone(&found));
        match builder {
            Some(builder) => builder(config),
            None => Err(Error::new(
                Status::Kind,
                format!(
                    "unknown cache kind `{kind}` for backend `{backend_id}`; available: {}",
                    self.known()
                ),
            )),
        }
    }

    /// The kinds that there are, each with its backend id before it, in order.
    pub fn kinds(&self) -> Vec<(String, String)> {
        let mut kinds: Vec<_> = self.builders.iter().map(|entry| entry.key().clone()).collect();
        kinds.sort();
        kinds
    }

    fn known(&self) -> String {
        let known: Vec<String> = self
            .kinds()
            .iter()
            .map(|(backend, kind)| format!("`{kind}` for `{backend}`"))
            .collect();
        known.join(", ")
    }
}

/// A cache in the registry, and the backend that it was made for.
#[derive(Clone)]
pub struct Entry {
    /// The backend id that the cache's builder is registered under.
    pub backend_id: String,
    /// The cache.
    pub cache: SharedCache,
}

/// Bytes of a key at most: what an option of ExecuTorch holds, without its end.
const MAX_KEY: usize = 255;

/// Caches by key, for the whole process.
pub struct CacheRegistry {
    entries: DashMap<String, Entry>,
    next: AtomicU64,
}

impl CacheRegistry {
    /// The registry of this process.
    pub fn global() -> &'static Self {
        static GLOBAL: LazyLock<CacheRegistry> =
            LazyLock::new(|| CacheRegistry { entries: DashMap::new(), next: AtomicU64::new(0) });
        &GLOBAL
    }

    /// Makes `entry` known under a key that nobody has, and that no other call
    /// returns.
    pub fn install_new(&self, entry: Entry) -> String {
        loop {
            let key = format!("cache-{}", self.next.fetch_add(1, Ordering::Relaxed));
            // A host may have named one of its own like it.
            if let Place::Vacant(place) = self.entries.entry(key.clone()) {
                place.insert(entry);
                return key;
            }
        }
    }

    /// Makes `entry` known under `key`.
    ///
    /// # Errors
    /// [`InvalidArgument`](Status::InvalidArgument) where the key is taken, empty, or
    /// longer than the 255 bytes that ExecuTorch's options hold.
    pub fn install(&self, key: &str, entry: Entry) -> Result<()> {
        if key.is_empty() || key.len() > MAX_KEY {
            fail!(
                InvalidArgument,
                "a cache key of {} bytes: programs are loaded with one of 1 to {MAX_KEY}",
                key.len()
            );
        }
        match self.entries.entry(key.to_owned()) {
            Place::Occupied(_) => fail!(
                InvalidArgument,
                "the cache key `{key}` is taken; erase it first, or name another"
            ),
            Place::Vacant(place) => {
                place.insert(entry);
                Ok(())
            }
        }
    }

    /// The entry under `key`.
    ///
    /// # Errors
    /// [`NoCache`](Status::NoCache) where there is none.
    pub fn get(&self, key: &str) -> Result<Entry> {
        let found = self.entries.get(key).map(|entry| Entry::clone(&entry));
        match found {
            Some(entry) => Ok(entry),
            None => fail!(NoCache, "no cache is known by the key `{key}`; is its session alive?"),
        }
    }

    /// Forgets `key`; those who share its cache keep it.
    pub fn erase(&self, key: &str) -> Option<Entry> {
        self.entries.remove(key).map(|(_, entry)| entry)
    }

    /// Forgets `key` if it is this cache's: whoever erased it before may have given
    /// the key to another.
    pub fn erase_own(&self, key: &str, cache: &SharedCache) -> Option<Entry> {
        self.entries.remove_if(key, |_, entry| entry.cache.is(cache)).map(|(_, entry)| entry)
    }
}
