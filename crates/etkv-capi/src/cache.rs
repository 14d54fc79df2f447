//! `etkv_cache`: a handle on a shared cache of any kind.

use std::ffi::c_char;
use std::ptr::{null, null_mut};

use etkv_core::{fail, Result, SharedCache};

use super::backends;
use super::boundary::{c_functions, free, lasting, out, put, text, value};
use super::config::{etkv_cache_config, given_format, read_config};
use super::handle::{self, Object};
use super::memory::{etkv_memory, fill_memory};

/// A handle on a cache that may have other owners.
#[allow(non_camel_case_types)]
pub struct etkv_cache {
    pub(super) cache: SharedCache,
}

impl Object for etkv_cache {
    const NAME: &'static str = "etkv_cache";
}

c_functions!(
    /// Makes a cache that is not in the registry.
    unsafe fn etkv_cache_new(
        backend_id: *const c_char,
        kind: *const c_char,
        config: *const etkv_cache_config,
        cache: *mut *mut etkv_cache,
    ) -> Result<()> {
        put(cache, "cache", || {
            let backend_id = text(backend_id, "backend_id")?;
            let kind = text(kind, "kind")?;
            let cache = backends::builders().build(backend_id, kind, read_config(config)?)?;
            Ok(handle::give(etkv_cache { cache }))
        })
    }

    /// Stores whether `n` more positions fit.
    unsafe fn etkv_cache_can_extend(
        cache: *const etkv_cache,
        n: i32,
        fits: *mut bool,
    ) -> Result<()> {
        put(fits, "fits", || {
            let cache = handle::look_up(cache, "cache")?;
            if n < 0 {
                fail!(InvalidArgument, "n is {n}, the minimum is 0");
            }
            let cache = cache.cache.lock()?;
            Ok(cache.can_extend(n))
        })
    }

    /// Stores the number of positions that the cache holds.
    unsafe fn etkv_cache_length(cache: *const etkv_cache, length: *mut i32) -> Result<()> {
        put(length, "length", || Ok(handle::look_up(cache, "cache")?.cache.lock()?.length()))
    }

    /// Stores the names of the formats that keys and values have now.
    unsafe fn etkv_cache_formats(
        cache: *const etkv_cache,
        k_format: *mut *const c_char,
        v_format: *mut *const c_char,
    ) -> Result<()> {
        let (k, v) = (out(k_format, "k_format")?, out(v_format, "v_format")?);
        let found = handle::look_up(cache, "cache")?.cache.lock()?.formats();
        k.write(lasting(&found[0].to_string()));
        v.write(lasting(&found[1].to_string()));
        Ok(())
    }

    /// Converts all rows to other formats.
    unsafe fn etkv_cache_convert(
        cache: *mut etkv_cache,
        k_format: *const c_char,
        v_format: *const c_char,
    ) -> Result<()> {
        let cache = handle::look_up(cache, "cache")?;
        let mut cache = cache.cache.lock()?;
        cache.convert(given_format(k_format, "k_format")?, given_format(v_format, "v_format")?)
    }

    /// Removes every position.
    unsafe fn etkv_cache_clear(cache: *mut etkv_cache, release: bool) -> Result<()> {
        handle::look_up(cache, "cache")?.cache.lock()?.clear(release)
    }

    /// Removes the positions at or after `length`.
    unsafe fn etkv_cache_rewind(cache: *mut etkv_cache, length: i32) -> Result<()> {
        handle::look_up(cache, "cache")?.cache.lock()?.rewind(length)
    }

    /// Stores the smallest length such that the cache can be rewound to it and to every greater length.
    unsafe fn etkv_cache_rewindable_to(cache: *const etkv_cache, length: *mut i32) -> Result<()> {
        put(length, "length", || handle::look_up(cache, "cache")?.cache.lock()?.rewindable_to())
    }

    /// Stores the greatest length, at most `position`, to which the cache can be rewound.
    unsafe fn etkv_cache_reachable(
        cache: *const etkv_cache,
        position: i32,
        reachable: *mut i32,
    ) -> Result<()> {
        put(reachable, "reachable", || {
            handle::look_up(cache, "cache")?.cache.lock()?.reachable(position)
        })
    }

    /// Makes a checkpoint, and stores its position.
    unsafe fn etkv_cache_mark(
        cache: *mut etkv_cache,
        position: i32,
        marked: *mut i32,
    ) -> Result<()> {
        put(marked, "marked", || handle::look_up(cache, "cache")?.cache.lock()?.mark(position))
    }

    /// Marks where the prompt of a turn will end.
    unsafe fn etkv_cache_mark_turn(cache: *mut etkv_cache, end: i32) -> Result<()> {
        handle::look_up(cache, "cache")?.cache.lock()?.mark_turn(end)
    }

    /// Rewinds to the greatest length that can be reached, and stores it.
    unsafe fn etkv_cache_rewind_to_reachable(
        cache: *mut etkv_cache,
        length: i32,
        reached: *mut i32,
    ) -> Result<()> {
        put(reached, "reached", || {
            handle::look_up(cache, "cache")?.cache.lock()?.rewind_to_reachable(length)
        })
    }

    /// Fills `memory`.
    unsafe fn etkv_cache_memory(cache: *const etkv_cache, memory: *mut etkv_memory) -> Result<()> {
        let memory = out(memory, "memory")?;
        let cache = handle::look_up(cache, "cache")?;
        fill_memory(memory, || Ok(cache.cache.lock()?.memory()))
    }
);

/// Returns another handle on the same cache. Returns NULL if `cache` is no live handle.
#[no_mangle]
pub extern "C" fn etkv_cache_share(cache: *const etkv_cache) -> *mut etkv_cache {
    value(null_mut(), || {
        let cache = handle::look_up(cache, "cache")?.cache.clone();
        Ok(handle::give(etkv_cache { cache }))
    })
}

/// Frees a handle.
#[no_mangle]
pub extern "C" fn etkv_cache_free(cache: *mut etkv_cache) {
    free(cache);
}

/// Returns the maximum number of positions. Returns 0 if `cache` is no live handle.
#[no_mangle]
pub extern "C" fn etkv_cache_capacity(cache: *const etkv_cache) -> i32 {
    value(0, || Ok(handle::look_up(cache, "cache")?.cache.capacity()))
}

/// Returns the number of attention layers. Returns 0 if `cache` is no live handle.
#[no_mangle]
pub extern "C" fn etkv_cache_n_layers(cache: *const etkv_cache) -> usize {
    value(0, || Ok(handle::look_up(cache, "cache")?.cache.n_layers()))
}

/// Returns the number of recurrent layers. Returns 0 if `cache` is no live handle.
#[no_mangle]
pub extern "C" fn etkv_cache_n_recurrent_layers(cache: *const etkv_cache) -> usize {
    value(0, || Ok(handle::look_up(cache, "cache")?.cache.n_recurrent_layers()))
}

/// Returns the maximum tokens of one step. Returns 0 if `cache` is no live handle.
#[no_mangle]
pub extern "C" fn etkv_cache_max_step_tokens(cache: *const etkv_cache) -> i32 {
    value(0, || Ok(handle::look_up(cache, "cache")?.cache.max_step_tokens()))
}

/// Returns the name of the cache's kind. Returns NULL if `cache` is no live handle.
#[no_mangle]
pub extern "C" fn etkv_cache_kind(cache: *const etkv_cache) -> *const c_char {
    value(null(), || Ok(lasting(handle::look_up(cache, "cache")?.cache.kind())))
}
