//! Where a runner's cache and a program meet, by key; and who makes which kind.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use parking_lot::{Mutex, RwLock};

use crate::cache::{AttendCache, CellsCache, ContiguousCache};
use crate::config::CacheConfig;
use crate::error::{fail, Error, Result, Status};

/// The backend id of ExecuTorch's MLX delegate.
pub const MLX_BACKEND: &str = "MLXBackend";

/// A cache that several owners share: sessions, programs, handles. The lock is
/// held for the whole of a step, and taken inside [`mlx::run`](crate::mlx::run): MLX
/// first, the cache second, everywhere.
pub type SharedCache = Arc<Mutex<dyn AttendCache>>;

/// A cache for several owners.
pub fn shared(cache: impl AttendCache + 'static) -> SharedCache {
    Arc::new(Mutex::new(cache))
}

/// Makes a cache of one kind.
pub type Builder = fn(CacheConfig) -> Result<SharedCache>;

/// Makes caches by backend id and kind.
///
/// A new kind registers itself; nothing here changes.
pub struct BuilderRegistry {
    builders: RwLock<HashMap<(String, String), Builder>>,
}

impl BuilderRegistry {
    /// The registry of this process, with the kinds of this crate.
    pub fn global() -> &'static Self {
        static GLOBAL: LazyLock<BuilderRegistry> = LazyLock::new(|| {
            let registry = BuilderRegistry { builders: RwLock::new(HashMap::new()) };
            registry.register(MLX_BACKEND, ContiguousCache::KIND, |config| {
                Ok(shared(ContiguousCache::new(config)?))
            });
            registry.register(MLX_BACKEND, CellsCache::SEQ, |config| {
                Ok(shared(CellsCache::new(config)?))
            });
            registry.register(MLX_BACKEND, CellsCache::TREE, |config| {
                Ok(shared(CellsCache::with_trees(config)?))
            });
            registry
        });
        &GLOBAL
    }

    /// Registers a kind, in place of what was there.
    pub fn register(&self, backend_id: &str, kind: &str, builder: Builder) {
        self.builders.write().insert((backend_id.to_owned(), kind.to_owned()), builder);
    }

    /// Makes a cache of this kind.
    ///
    /// # Errors
    /// [`Kind`](Status::Kind) where nobody makes it, and the builder's own.
    pub fn build(&self, backend_id: &str, kind: &str, config: CacheConfig) -> Result<SharedCache> {
        let key = (backend_id.to_owned(), kind.to_owned());
        let builder = self.builders.read().get(&key).copied();
        match builder {
            Some(builder) => builder(config),
            None => Err(Error::new(
                Status::Kind,
                format!(
                    "nobody makes caches of kind `{kind}` for backend `{backend_id}`; known: {}",
                    self.known()
                ),
            )),
        }
    }

    fn known(&self) -> String {
        let builders = self.builders.read();
        let mut known: Vec<String> =
            builders.keys().map(|(backend, kind)| format!("`{kind}` for `{backend}`")).collect();
        known.sort();
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

/// Caches by key, for the whole process.
pub struct CacheRegistry {
    entries: Mutex<HashMap<String, Entry>>,
    next: AtomicU64,
}

impl CacheRegistry {
    /// The registry of this process.
    pub fn global() -> &'static Self {
        static GLOBAL: LazyLock<CacheRegistry> = LazyLock::new(|| CacheRegistry {
            entries: Mutex::new(HashMap::new()),
            next: AtomicU64::new(0),
        });
        &GLOBAL
    }

    /// A key that no other call returns.
    pub fn unique_key(&self) -> String {
        format!("cache-{}", self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Makes `entry` known under `key`.
    ///
    /// # Errors
    /// [`InvalidArgument`](Status::InvalidArgument) where the key is taken.
    pub fn install(&self, key: &str, entry: Entry) -> Result<()> {
        let mut entries = self.entries.lock();
        if entries.contains_key(key) {
            fail!(InvalidArgument, "the cache key `{key}` is taken");
        }
        entries.insert(key.to_owned(), entry);
        Ok(())
    }

    /// The entry under `key`.
    ///
    /// # Errors
    /// [`NoCache`](Status::NoCache) where there is none.
    pub fn get(&self, key: &str) -> Result<Entry> {
        match self.entries.lock().get(key) {
            Some(entry) => Ok(entry.clone()),
            None => fail!(NoCache, "no cache is known by the key `{key}`; is its session alive?"),
        }
    }

    /// Forgets `key`; those who share its cache keep it.
    pub fn erase(&self, key: &str) -> Option<Entry> {
        self.entries.lock().remove(key)
    }
}
