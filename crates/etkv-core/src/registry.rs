//! Two registries: of caches by key, for programs, and of builders by kind.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use dashmap::{DashMap, Entry as Slot};

use crate::cache::{CellsCache, ContiguousCache};
use crate::config::CacheConfig;
use crate::error::{fail, Error, Result, Status};
use crate::shared::SharedCache;
use crate::store::Store;

/// Creates a cache of one kind.
pub type Builder = Arc<dyn Fn(CacheConfig) -> Result<SharedCache> + Send + Sync>;

/// The builders of caches, by backend id and kind.
///
/// A new kind registers itself; this code does not change. A builder may use the registry itself, because the
/// registry is not locked while a builder is called or dropped.
pub struct BuilderRegistry {
    builders: DashMap<(String, String), Builder>,
}

impl BuilderRegistry {
    /// Returns the registry of this process. It is empty until backends register their kinds.
    pub fn global() -> &'static Self {
        static GLOBAL: LazyLock<BuilderRegistry> =
            LazyLock::new(|| BuilderRegistry { builders: DashMap::new() });
        &GLOBAL
    }

    /// Registers a kind. Replaces a kind of the same name. Existing caches are not affected.
    pub fn register(
        &self,
        backend_id: &str,
        kind: &str,
        builder: impl Fn(CacheConfig) -> Result<SharedCache> + Send + Sync + 'static,
    ) {
        let key = (backend_id.to_owned(), kind.to_owned());
        // The replaced builder is dropped outside the lock: its destructor may run any code.
        drop(self.builders.insert(key, Arc::new(builder)));
    }

    /// Registers the three kinds of this crate on a backend's store: contiguous, seq and tree.
    pub fn register_kinds<S: Store>(&self, backend_id: &str) {
        self.register(backend_id, ContiguousCache::<S>::KIND, |config| {
            if config.recurrent_layers.is_empty() {
                Ok(SharedCache::new(ContiguousCache::<S>::new(config)?))
            } else {
                Ok(SharedCache::new(CellsCache::<S>::contiguous(config)?))
            }
        });
        self.register(backend_id, CellsCache::<S>::SEQ, |config| {
            Ok(SharedCache::new(CellsCache::<S>::new(config)?))
        });
        self.register(backend_id, CellsCache::<S>::TREE, |config| {
            Ok(SharedCache::new(CellsCache::<S>::with_trees(config)?))
        });
    }

    /// Creates a cache of this kind.
    ///
    /// # Errors
    /// [`Kind`](Status::Kind) for an unknown kind, and errors of the builder.
    pub fn build(&self, backend_id: &str, kind: &str, config: CacheConfig) -> Result<SharedCache> {
        let key = (backend_id.to_owned(), kind.to_owned());
        let builder = self.builders.get(&key).map(|found| Builder::clone(&found));
        match builder {
            Some(builder) => builder(config),
            None => Err(Error::new(Status::Kind, self.unknown(backend_id, kind))),
        }
    }

    /// Returns the pairs of backend id and kind, in order.
    pub fn kinds(&self) -> Vec<(String, String)> {
        let mut kinds: Vec<_> = self.builders.iter().map(|entry| entry.key().clone()).collect();
        kinds.sort();
        kinds
    }

    /// Returns the message for an unknown kind or backend. It lists the available kinds or backends.
    fn unknown(&self, backend_id: &str, kind: &str) -> String {
        let known = self.kinds();
        let kinds: Vec<&str> = known
            .iter()
            .filter(|(backend, _)| backend == backend_id)
            .map(|(_, kind)| kind.as_str())
            .collect();
        if !kinds.is_empty() {
            let kinds = kinds.join(", ");
            return format!(
                "unknown cache kind `{kind}` for backend `{backend_id}`; available: {kinds}"
            );
        }
        let mut backends: Vec<&str> = known.iter().map(|(backend, _)| backend.as_str()).collect();
        backends.dedup();
        format!("unknown backend `{backend_id}`; available: {}", backends.join(", "))
    }
}

/// A cache in the registry, and the backend for which it was created.
#[derive(Clone)]
pub struct Entry {
    /// The backend id under which the cache's builder is registered.
    pub backend_id: String,
    /// The cache.
    pub cache: SharedCache,
}

/// The maximum number of bytes of a key: the size of an ExecuTorch option without its terminating zero.
const MAX_KEY: usize = 255;

/// Caches by key, for the whole process.
pub struct CacheRegistry {
    entries: DashMap<String, Entry>,
    next: AtomicU64,
}

impl CacheRegistry {
    /// Returns the registry of this process.
    pub fn global() -> &'static Self {
        static GLOBAL: LazyLock<CacheRegistry> =
            LazyLock::new(|| CacheRegistry { entries: DashMap::new(), next: AtomicU64::new(0) });
        &GLOBAL
    }

    /// Registers `entry` under a new unique key.
    pub fn install_new(&self, entry: Entry) -> String {
        loop {
            let key = format!("cache-{}", self.next.fetch_add(1, Ordering::Relaxed));
            // The host may have registered the same key.
            if let Slot::Vacant(place) = self.entries.entry(key.clone()) {
                place.insert(entry);
                return key;
            }
        }
    }

    /// Registers `entry` under `key`.
    ///
    /// # Errors
    /// [`InvalidArgument`](Status::InvalidArgument) if the key is already registered, empty, or longer than the 255
    /// bytes of ExecuTorch's options.
    pub fn install(&self, key: &str, entry: Entry) -> Result<()> {
        if key.is_empty() || key.len() > MAX_KEY {
            fail!(
                InvalidArgument,
                "expected a cache key of 1 to {MAX_KEY} bytes, got one of {} bytes",
                key.len()
            );
        }
        match self.entries.entry(key.to_owned()) {
            Slot::Occupied(_) => fail!(
                InvalidArgument,
                "the cache key `{key}` is taken; erase it first, or name another"
            ),
            Slot::Vacant(place) => {
                place.insert(entry);
                Ok(())
            }
        }
    }

    /// Returns the entry under `key`.
    ///
    /// # Errors
    /// [`NoCache`](Status::NoCache) if there is none.
    pub fn get(&self, key: &str) -> Result<Entry> {
        let found = self.entries.get(key).map(|entry| Entry::clone(&entry));
        match found {
            Some(entry) => Ok(entry),
            None => {
                fail!(NoCache, "there is no cache under the key `{key}`; keep its session alive")
            }
        }
    }

    /// Returns the keys in order, each with its cache's holder number in the memory budget. Omits caches that the
    /// budget does not count.
    pub(crate) fn holders(&self) -> Vec<(String, u64)> {
        let of = |entry: dashmap::mapref::multiple::RefMulti<'_, String, Entry>| {
            Some((entry.key().clone(), entry.cache.holder()?))
        };
        let mut holders: Vec<_> = self.entries.iter().filter_map(of).collect();
        holders.sort();
        holders
    }

    /// Removes `key`. The cache remains as long as it has other owners.
    pub fn erase(&self, key: &str) -> Option<Entry> {
        self.entries.remove(key).map(|(_, entry)| entry)
    }

    /// Removes `key` if it belongs to this cache. If the key was removed earlier, it may belong to another cache now.
    pub fn erase_own(&self, key: &str, cache: &SharedCache) -> Option<Entry> {
        self.entries.remove_if(key, |_, entry| entry.cache.is(cache)).map(|(_, entry)| entry)
    }
}
