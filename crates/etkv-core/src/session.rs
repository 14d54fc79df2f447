//! A cache with the key by which programs find it.

use crate::config::CacheConfig;
use crate::error::Result;
use crate::registry::{BuilderRegistry, CacheRegistry, Entry};
use crate::shared::SharedCache;

/// A cache that is registered as long as the session lives.
///
/// Programs that are bound to the cache keep it alive after the session is dropped.
pub struct Session {
    key: String,
    cache: SharedCache,
}

impl Session {
    /// Creates a cache of this kind with a builder of `builders`, and registers it under a new key.
    ///
    /// # Errors
    /// [`Kind`](crate::Status::Kind) for an unknown kind, and errors of the builder.
    pub fn new(
        builders: &BuilderRegistry,
        backend_id: &str,
        kind: &str,
        config: CacheConfig,
    ) -> Result<Self> {
        let cache = builders.build(backend_id, kind, config)?;
        let entry = Entry { backend_id: backend_id.to_owned(), cache: cache.clone() };
        let key = CacheRegistry::global().install_new(entry);
        Ok(Self { key, cache })
    }

    /// Returns the key with which programs are loaded.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Returns another handle of the cache.
    pub fn cache(&self) -> SharedCache {
        self.cache.clone()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // The entry is dropped after the registry is unlocked, because the last owner of a cache frees its buffers.
        drop(CacheRegistry::global().erase_own(&self.key, &self.cache));
    }
}
