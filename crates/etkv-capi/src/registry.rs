//! The process-wide registry of caches by key.

use std::ffi::c_char;

use etkv_core::{fail, CacheRegistry, Entry};

use super::boundary::{boundary, out, text};
use super::cache::etkv_cache;
use super::error::etkv_error;
use super::handle;

/// Adds a cache under a key.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_registry_install(
    key: *const c_char,
    backend_id: *const c_char,
    cache: *const etkv_cache,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller keeps the contract above.
    unsafe {
        boundary(error, || {
            let key = text(key, "key")?;
            if key.is_empty() {
                fail!(
                    InvalidArgument,
                    "expected a cache key of 1 to 255 bytes, got one of 0 bytes"
                );
            }
            let backend_id = text(backend_id, "backend_id")?.to_owned();
            let cache = handle::look_up(cache, "cache")?.cache.clone();
            CacheRegistry::global().install(key, Entry { backend_id, cache })
        })
    }
}

/// Makes a handle on the cache under a key.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_registry_get(
    key: *const c_char,
    cache: *mut *mut etkv_cache,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller keeps the contract above.
    unsafe {
        boundary(error, || {
            let target = out(cache, "cache")?;
            let entry = CacheRegistry::global().get(text(key, "key")?)?;
            target.write(handle::give(etkv_cache { cache: entry.cache }));
            Ok(())
        })
    }
}

/// Removes a key.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_registry_erase(
    key: *const c_char,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller keeps the contract above.
    unsafe {
        boundary(error, || {
            let key = text(key, "key")?;
            match CacheRegistry::global().erase(key) {
                Some(_) => Ok(()),
                None => fail!(NoCache, "there is no cache under the key `{key}`"),
            }
        })
    }
}
