//! The process-wide registry of caches by key.

use std::ffi::c_char;

use etkv_core::{fail, CacheRegistry, Entry, Result};

use super::boundary::{c_functions, put, text};
use super::cache::etkv_cache;
use super::handle;

c_functions!(
    /// Adds a cache under a key.
    unsafe fn etkv_registry_install(
        key: *const c_char,
        backend_id: *const c_char,
        cache: *const etkv_cache,
    ) -> Result<()> {
        let key = text(key, "key")?;
        if key.is_empty() {
            fail!(InvalidArgument, "expected a cache key of 1 to 255 bytes, got one of 0 bytes");
        }
        let backend_id = text(backend_id, "backend_id")?.to_owned();
        let cache = handle::look_up(cache, "cache")?.cache.clone();
        CacheRegistry::global().install(key, Entry { backend_id, cache })
    }

    /// Makes a handle on the cache under a key.
    unsafe fn etkv_registry_get(key: *const c_char, cache: *mut *mut etkv_cache) -> Result<()> {
        put(cache, "cache", || {
            let entry = CacheRegistry::global().get(text(key, "key")?)?;
            Ok(handle::give(etkv_cache { cache: entry.cache }))
        })
    }

    /// Removes a key.
    unsafe fn etkv_registry_erase(key: *const c_char) -> Result<()> {
        let key = text(key, "key")?;
        match CacheRegistry::global().erase(key) {
            Some(_) => Ok(()),
            None => fail!(NoCache, "there is no cache under the key `{key}`"),
        }
    }
);
