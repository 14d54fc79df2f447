//! `etkv_prefix_cache`: prefixes in memory, by their texts.

use std::sync::Arc;

use etkv_core::Result;
use etkv_file::{Pin, PrefixCache, PrefixCacheOptions, PrefixCacheReport};

use super::boundary::{c_functions, free, out, put, read_grown, read_struct};
use super::cache::etkv_cache;
use super::handle::{self, Object};
use super::prefix_store::etkv_prefix_store;
use super::saving::{etkv_save_options, with_text};

/// A prefix cache; see the header.
#[allow(non_camel_case_types)]
pub struct etkv_prefix_cache(PrefixCache);

impl Object for etkv_prefix_cache {
    const NAME: &'static str = "etkv_prefix_cache";
}

/// A pin; see the header.
#[allow(non_camel_case_types)]
pub struct etkv_prefix_pin(#[allow(dead_code)] Pin);

impl Object for etkv_prefix_pin {
    const NAME: &'static str = "etkv_prefix_pin";
}

/// The limits of a prefix cache, and the store that it reads from; see the header.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy)]
pub struct etkv_prefix_cache_options {
    struct_size: usize,
    max_bytes: u64,
    store: *const etkv_prefix_store,
}

/// The contents of a prefix cache and the number of lookups; see the header.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy)]
pub struct etkv_prefix_statistics {
    struct_size: usize,
    n_prefixes: usize,
    n_pinned: usize,
    n_bytes: u64,
    tokens_asked: u64,
    tokens_in_memory: u64,
    tokens_in_store: u64,
    n_ahead_waiting: usize,
    n_ahead_read: u64,
    tokens_ahead: u64,
    n_ahead_failed: u64,
}

/// The size of the struct before it had the fields of prefetching.
const WITHOUT_AHEAD: usize = std::mem::offset_of!(etkv_prefix_statistics, n_ahead_waiting);

c_functions!(
    /// Makes a prefix cache.
    unsafe fn etkv_prefix_cache_new(
        options: *const etkv_prefix_cache_options,
        prefixes: *mut *mut etkv_prefix_cache,
    ) -> Result<()> {
        let target = out(prefixes, "prefixes")?;
        let mut chosen = PrefixCacheOptions::default();
        if !options.is_null() {
            let options = read_struct(options, "options")?;
            chosen.max_bytes = (options.max_bytes > 0).then_some(options.max_bytes);
            if !options.store.is_null() {
                let store = handle::look_up(options.store, "options.store")?;
                chosen.store = Some(Arc::clone(&store.0));
            }
        }
        target.write(handle::give(etkv_prefix_cache(PrefixCache::new(chosen))));
        Ok(())
    }

    /// Attaches a cache to the longest kept prefix of a text.
    unsafe fn etkv_prefix_cache_attach(
        prefixes: *const etkv_prefix_cache,
        cache: *mut etkv_cache,
        options: *const etkv_save_options,
        n_attached: *mut usize,
    ) -> Result<()> {
        put(n_attached, "n_attached", || {
            let prefixes = handle::look_up(prefixes, "prefixes")?;
            with_text(cache, options, |cache, text| {
                prefixes.0.attach(cache, text.fingerprint, text.tokens)
            })
        })
    }

    /// Stores how many tokens `etkv_prefix_cache_attach` would find.
    unsafe fn etkv_prefix_cache_find(
        prefixes: *const etkv_prefix_cache,
        cache: *const etkv_cache,
        options: *const etkv_save_options,
        n_kept: *mut usize,
    ) -> Result<()> {
        put(n_kept, "n_kept", || {
            let prefixes = handle::look_up(prefixes, "prefixes")?;
            with_text(cache, options, |cache, text| {
                prefixes.0.n_kept(cache, text.fingerprint, text.tokens)
            })
        })
    }

    /// Keeps the contents of a cache.
    unsafe fn etkv_prefix_cache_keep(
        prefixes: *const etkv_prefix_cache,
        cache: *mut etkv_cache,
        options: *const etkv_save_options,
        kept: *mut bool,
    ) -> Result<()> {
        let prefixes = handle::look_up(prefixes, "prefixes")?;
        let is_kept = with_text(cache, options, |cache, text| {
            prefixes.0.keep(cache, text.fingerprint, text.tokens)
        })?;
        if !kept.is_null() {
            kept.write(is_kept);
        }
        Ok(())
    }

    /// Reads the prefix of a text from the store into memory, on another thread.
    unsafe fn etkv_prefix_cache_prefetch(
        prefixes: *const etkv_prefix_cache,
        cache: *const etkv_cache,
        options: *const etkv_save_options,
        waits: *mut bool,
    ) -> Result<()> {
        let prefixes = handle::look_up(prefixes, "prefixes")?;
        let found = with_text(cache, options, |cache, text| {
            prefixes.0.prefetch(cache, text.fingerprint, text.tokens)
        })?;
        if !waits.is_null() {
            waits.write(found);
        }
        Ok(())
    }

    /// Pins the prefix of a text.
    unsafe fn etkv_prefix_cache_pin(
        prefixes: *const etkv_prefix_cache,
        cache: *const etkv_cache,
        options: *const etkv_save_options,
        pin: *mut *mut etkv_prefix_pin,
    ) -> Result<()> {
        put(pin, "pin", || {
            let prefixes = handle::look_up(prefixes, "prefixes")?;
            let pinned = with_text(cache, options, |cache, text| {
                prefixes.0.pin(cache, text.fingerprint, text.tokens)
            })?;
            Ok(handle::give(etkv_prefix_pin(pinned)))
        })
    }

    /// Frees prefixes that nothing uses.
    unsafe fn etkv_prefix_cache_reclaim(
        prefixes: *const etkv_prefix_cache,
        n_bytes: u64,
        freed: *mut u64,
    ) -> Result<()> {
        let found = handle::look_up(prefixes, "prefixes")?.0.reclaim(n_bytes);
        if !freed.is_null() {
            freed.write(found);
        }
        Ok(())
    }

    /// Drops all prefixes that are not pinned.
    unsafe fn etkv_prefix_cache_clear(prefixes: *const etkv_prefix_cache) -> Result<()> {
        handle::look_up(prefixes, "prefixes")?.0.clear();
        Ok(())
    }

    /// Fills `statistics`.
    unsafe fn etkv_prefix_cache_read(
        prefixes: *const etkv_prefix_cache,
        statistics: *mut etkv_prefix_statistics,
    ) -> Result<()> {
        let (_, size) = read_grown(statistics, WITHOUT_AHEAD, "statistics")?;
        let found = handle::look_up(prefixes, "prefixes")?.0.report();
        let PrefixCacheReport { prefixes, pinned, bytes, .. } = found;
        let filled = etkv_prefix_statistics {
            struct_size: statistics.cast::<usize>().read(),
            n_prefixes: prefixes,
            n_pinned: pinned,
            n_bytes: bytes,
            tokens_asked: found.tokens_asked,
            tokens_in_memory: found.tokens_in_memory,
            tokens_in_store: found.tokens_in_store,
            n_ahead_waiting: found.ahead_waiting,
            n_ahead_read: found.ahead_read,
            tokens_ahead: found.tokens_ahead,
            n_ahead_failed: found.ahead_failed,
        };
        // The caller's struct has that size.
        statistics.cast::<u8>().copy_from_nonoverlapping((&raw const filled).cast(), size);
        Ok(())
    }
);

/// Frees a prefix cache.
#[no_mangle]
pub extern "C" fn etkv_prefix_cache_free(prefixes: *mut etkv_prefix_cache) {
    free(prefixes);
}

/// Unpins a prefix.
#[no_mangle]
pub extern "C" fn etkv_prefix_pin_free(pin: *mut etkv_prefix_pin) {
    free(pin);
}
