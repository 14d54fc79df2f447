//! Two registries: caches by key, where programs find them, and builders by kind.

use std::collections::hash_map::Entry as Slot;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use parking_lot::{Mutex, RwLock};

use crate::config::CacheConfig;
use crate::error::{fail, Error, Result, Status};
use crate::shared::SharedCache;

/// Creates a cache of one kind.
pub type Builder = Arc<dyn Fn(CacheConfig) -> Result<SharedCache> + Send + Sync>;

/// Creates caches by backend id and kind.
///
/// A new kind registers itself; no code changes here.
pub struct BuilderRegistry {
    builders: RwLock<HashMap<(String, String), Builder>>,
}

impl BuilderRegistry {
    /// Returns the registry of this process. It is empty until backends register their kinds.
    pub fn global() -> &'static Self {
        static GLOBAL: LazyLock<BuilderRegistry> =
            LazyLock::new(|| BuilderRegistry { builders: RwLock::new(HashMap::new()) });
        &GLOBAL
    }

    /// Registers a kind, and replaces a kind of that name. Existing caches stay as they are.
    pub fn register(
        &self,
        backend_id: &str,
        kind: &str,
        builder: impl Fn(CacheConfig) -> Result<SharedCache> + Send + Sync + 'static,
    ) {
        let key = (backend_id.to_owned(), kind.to_owned());
        // The replaced builder is dropped outside the lock: its destructor may be any code.
        let before = self.builders.write().insert(key, Arc::new(builder));
        drop(before);
    }

    /// Registers a kind under a new name, as [`register`](Self::register).
    ///
    /// # Errors
    /// [`InvalidArgument`](Status::InvalidArgument) if the name is taken.
    pub fn register_new(
        &self,
        backend_id: &str,
        kind: &str,
        builder: impl Fn(CacheConfig) -> Result<SharedCache> + Send + Sync + 'static,
    ) -> Result<()> {
        let key = (backend_id.to_owned(), kind.to_owned());
        match self.builders.write().entry(key) {
            Slot::Occupied(_) => {
                fail!(
                    InvalidArgument,
                    "kind `{kind}` is registered for `{backend_id}`; choose another name"
                )
            }
            Slot::Vacant(place) => {
                place.insert(Arc::new(builder));
                Ok(())
            }
        }
    }

    /// Returns whether this kind is registered.
    pub fn knows(&self, backend_id: &str, kind: &str) -> bool {
        self.builders.read().contains_key(&(backend_id.to_owned(), kind.to_owned()))
    }

    /// Creates a cache of this kind.
    ///
    /// # Errors
    /// [`Kind`](Status::Kind) for an unknown kind, and those of the builder.
    pub fn build(&self, backend_id: &str, kind: &str, config: CacheConfig) -> Result<SharedCache> {
        let key = (backend_id.to_owned(), kind.to_owned());
        let builder = self.builders.read().get(&key).cloned();
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

    /// Returns the pairs of backend id and kind, in order.
    pub fn kinds(&self) -> Vec<(String, String)> {
        let mut kinds: Vec<_> = self.builders.read().keys().cloned().collect();
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

/// The most bytes of a key: what an option of ExecuTorch holds, without its end.
const MAX_KEY: usize = 255;

/// Caches by key, for the whole process.
pub struct CacheRegistry {
    entries: Mutex<HashMap<String, Entry>>,
    next: AtomicU64,
}

impl CacheRegistry {
    /// Returns the registry of this process.
    pub fn global() -> &'static Self {
        static GLOBAL: LazyLock<CacheRegistry> = LazyLock::new(|| CacheRegistry {
            entries: Mutex::new(HashMap::new()),
            next: AtomicU64::new(0),
        });
        &GLOBAL
    }

    /// Registers `entry` under a new key, which no other call returns.
    pub fn install_new(&self, entry: Entry) -> String {
        let mut entries = self.entries.lock();
        loop {
            let key = format!("cache-{}", self.next.fetch_add(1, Ordering::Relaxed));
            // A host may have chosen such a key.
            if !entries.contains_key(&key) {
                entries.insert(key.clone(), entry);
                return key;
            }
        }
    }

    /// Registers `entry` under `key`.
    ///
    /// # Errors
    /// [`InvalidArgument`](Status::InvalidArgument) if the key is taken, empty, or longer than the
    /// 255 bytes that ExecuTorch's options hold.
    pub fn install(&self, key: &str, entry: Entry) -> Result<()> {
        if key.is_empty() || key.len() > MAX_KEY {
            fail!(
                InvalidArgument,
                "expected a cache key of 1 to {MAX_KEY} bytes, got one of {} bytes",
                key.len()
            );
        }
        let mut entries = self.entries.lock();
        if entries.contains_key(key) {
            fail!(
                InvalidArgument,
                "the cache key `{key}` is taken; erase it first, or name another"
            );
        }
        entries.insert(key.to_owned(), entry);
        Ok(())
    }

    /// Returns the entry under `key`.
    ///
    /// # Errors
    /// [`NoCache`](Status::NoCache) if there is none.
    pub fn get(&self, key: &str) -> Result<Entry> {
        match self.entries.lock().get(key) {
            Some(entry) => Ok(entry.clone()),
            None => fail!(NoCache, "no cache is known by the key `{key}`; keep its session alive"),
        }
    }

    /// Removes `key`. Other owners of its cache keep the cache.
    pub fn erase(&self, key: &str) -> Option<Entry> {
        self.entries.lock().remove(key)
    }

    /// Removes `key` if it has this cache. After an earlier removal the key may belong to another
    /// cache.
    pub fn erase_own(&self, key: &str, cache: &SharedCache) -> Option<Entry> {
        let mut entries = self.entries.lock();
        if entries.get(key).is_some_and(|entry| entry.cache.is(cache)) {
            return entries.remove(key);
        }
        None
    }
}
