//! `etkv_prefix`: the frozen contents of a cache. Other caches continue from these contents.

use etkv_core::{fail, Cache, Prefix, Result, ShareCache};

use super::boundary::{c_functions, free, put, value};
use super::cache::etkv_cache;
use super::handle::{self, Object};

/// A prefix; see the header.
#[allow(non_camel_case_types)]
pub struct etkv_prefix(Prefix);

impl Object for etkv_prefix {
    const NAME: &'static str = "etkv_prefix";
}

c_functions!(
    /// Freezes the contents of a cache.
    unsafe fn etkv_cache_freeze(
        cache: *mut etkv_cache,
        prefix: *mut *mut etkv_prefix,
    ) -> Result<()> {
        put(prefix, "prefix", || {
            let cache = handle::look_up(cache, "cache")?;
            let frozen = face(&mut *cache.cache.lock()?)?.freeze()?;
            Ok(handle::give(etkv_prefix(frozen)))
        })
    }

    /// Makes an empty cache hold the first `length` positions of a prefix.
    unsafe fn etkv_cache_attach(
        cache: *mut etkv_cache,
        prefix: *const etkv_prefix,
        length: i32,
    ) -> Result<()> {
        let cache = handle::look_up(cache, "cache")?;
        let prefix = handle::look_up(prefix, "prefix")?;
        let mut cache = cache.cache.lock()?;
        face(&mut *cache)?.attach(&prefix.0, length)
    }
);

/// Returns the number of positions, or -1 if `prefix` is no live handle.
#[no_mangle]
pub extern "C" fn etkv_prefix_length(prefix: *const etkv_prefix) -> i32 {
    value(-1, || Ok(handle::look_up(prefix, "prefix")?.0.length()))
}

/// Returns the smallest length that `etkv_cache_attach` accepts for a prefix, or -1 if `prefix` is no live handle.
#[no_mangle]
pub extern "C" fn etkv_prefix_rewindable_to(prefix: *const etkv_prefix) -> i32 {
    value(-1, || Ok(handle::look_up(prefix, "prefix")?.0.rewindable_to()))
}

/// Returns the bytes of the rows, or 0 if `prefix` is no live handle.
#[no_mangle]
pub extern "C" fn etkv_prefix_bytes(prefix: *const etkv_prefix) -> u64 {
    value(0, || Ok(handle::look_up(prefix, "prefix")?.0.bytes()))
}

/// Frees a handle.
#[no_mangle]
pub extern "C" fn etkv_prefix_free(prefix: *mut etkv_prefix) {
    free(prefix);
}

fn face(cache: &mut dyn Cache) -> Result<&mut dyn ShareCache> {
    let kind = cache.kind().to_owned();
    match cache.sharing() {
        Some(face) => Ok(face),
        None => fail!(Unsupported, "caches of kind `{kind}` cannot share memory"),
    }
}
