//! A cache of one's own, and the key by which programs find it.

use crate::config::CacheConfig;
use crate::error::Result;
use crate::registry::{BuilderRegistry, CacheRegistry, Entry};
use crate::shared::SharedCache;

/// A cache in the registry, for as long as this lives.
///
/// Programs that were bound to the cache keep it when the session is dropped.
pub struct Session {
    key: String,
    cache: SharedCache,
}

impl Session {
    /// Makes a cache of this kind and registers it under a new key.
    ///
    /// # Errors
    /// [`Kind`](crate::Status::Kind) for a kind that nobody makes, and the
    /// builder's own.
    pub fn new(backend_id: &str, kind: &str, config: CacheConfig) -> Result<Self> {
        let cache = BuilderRegistry::global().build(backend_id, kind, config)?;
        let entry = Entry { backend_id: backend_id.to_owned(), cache: cache.clone() };
        let key = CacheRegistry::global().install_new(entry);
        Ok(Self { key, cache })
    }

    /// The key that a program is loaded with.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The cache, to share.
    pub fn cache(&self) -> SharedCache {
        self.cache.clone()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // The entry is dropped here, outside the registry's lock: the last owner
        // of a cache frees its buffers.
        drop(CacheRegistry::global().erase_own(&self.key, &self.cache));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::MLX_BACKEND;

    /// A host may name keys of its own as sessions do.
    #[test]
    fn keys_pass_by_those_of_the_host() {
        let config = CacheConfig::uniform(1, 1, 4, 8);
        let session = Session::new(MLX_BACKEND, "contiguous", config.clone()).unwrap();
        let number: u64 = session.key().trim_start_matches("cache-").parse().unwrap();
        let registry = CacheRegistry::global();
        let entry = registry.get(session.key()).unwrap();
        let taken: Vec<String> = (1..20).map(|next| format!("cache-{}", number + next)).collect();
        let installed: Vec<&String> =
            taken.iter().filter(|key| registry.install(key, entry.clone()).is_ok()).collect();
        let other = Session::new(MLX_BACKEND, "contiguous", config).unwrap();
        assert!(!other.cache().is(&session.cache()));
        assert!(registry.get(other.key()).unwrap().cache.is(&other.cache()));
        for key in installed {
            registry.erase(key);
        }
        for key in ["", &"k".repeat(256)] {
            let error = registry.install(key, entry.clone()).unwrap_err();
            assert!(error.message().contains(&format!("of {} bytes", key.len())), "{error}");
        }
    }
}
