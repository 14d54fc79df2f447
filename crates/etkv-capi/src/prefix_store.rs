//! `etkv_prefix_store`: a folder of texts that caches have read.

use std::ffi::c_char;

use etkv_core::{Cache, Result};
use etkv_file::{Labels, PrefixStore};

use super::boundary::{boundary, free, list, out, read_struct};
use super::cache::etkv_cache;
use super::error::etkv_error;
use super::handle::{self, Object};
use super::saving::{etkv_save_options, fingerprint_of, given_path};

/// A store; see the header.
#[allow(non_camel_case_types)]
pub struct etkv_prefix_store(PrefixStore);

impl Object for etkv_prefix_store {
    const NAME: &'static str = "etkv_prefix_store";
}

/// Opens a folder.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_prefix_store_open(
    folder: *const c_char,
    max_bytes: u64,
    store: *mut *mut etkv_prefix_store,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe {
        boundary(error, || {
            let target = out(store, "store")?;
            let opened = PrefixStore::open(given_path(folder, "folder")?, max_bytes)?;
            target.write(handle::give(etkv_prefix_store(opened)));
            Ok(())
        })
    }
}

/// Frees a store. The folder stays.
#[no_mangle]
pub extern "C" fn etkv_prefix_store_free(store: *mut etkv_prefix_store) {
    free(store);
}

/// Stores the number of files in the folder, and their bytes.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_prefix_store_usage(
    store: *const etkv_prefix_store,
    n_files: *mut usize,
    n_bytes: *mut u64,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe {
        boundary(error, || {
            let (files, bytes) = (out(n_files, "n_files")?, out(n_bytes, "n_bytes")?);
            let usage = handle::look_up(store, "store")?.0.usage()?;
            files.write(usage.0);
            bytes.write(usage.1);
            Ok(())
        })
    }
}

/// Stores the contents of a cache in the folder.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_prefix_store_save(
    store: *const etkv_prefix_store,
    cache: *const etkv_cache,
    options: *const etkv_save_options,
    written: *mut bool,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe {
        boundary(error, || {
            let store = handle::look_up(store, "store")?;
            let cache = handle::look_up(cache, "cache")?;
            let options = read_struct(options, "options")?;
            let fingerprint = fingerprint_of(options.fingerprint)?;
            let tokens = list(options.tokens, options.n_tokens, "tokens")?;
            let mut cache = cache.cache.lock()?;
            let saved = store.0.save(&mut *cache, Labels { fingerprint, tokens })?;
            if !written.is_null() {
                written.write(saved);
            }
            Ok(())
        })
    }
}

/// Loads the longest beginning of a text that the folder has.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_prefix_store_load(
    store: *const etkv_prefix_store,
    cache: *mut etkv_cache,
    options: *const etkv_save_options,
    n_loaded: *mut usize,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe {
        boundary(error, || {
            write_count(store, cache, options, (n_loaded, "n_loaded"), |store, cache, labels| {
                store.load(cache, labels.fingerprint, labels.tokens)
            })
        })
    }
}

/// Stores how many of the first tokens of a text a cache like this one could load.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_prefix_store_find(
    store: *const etkv_prefix_store,
    cache: *const etkv_cache,
    options: *const etkv_save_options,
    n_stored: *mut usize,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe {
        boundary(error, || {
            write_count(store, cache, options, (n_stored, "n_stored"), |store, cache, labels| {
                store.n_stored(cache, labels.fingerprint, labels.tokens)
            })
        })
    }
}

/// Writes the number of tokens that `find` returns for the text of `options`.
///
/// # Safety
/// Pointers are NULL or as the header says.
unsafe fn write_count(
    store: *const etkv_prefix_store,
    cache: *const etkv_cache,
    options: *const etkv_save_options,
    (target, name): (*mut usize, &str),
    find: impl FnOnce(&PrefixStore, &mut dyn Cache, Labels) -> Result<usize>,
) -> Result<()> {
    // SAFETY: the caller says so.
    unsafe {
        let target = out(target, name)?;
        let store = handle::look_up(store, "store")?;
        let cache = handle::look_up(cache, "cache")?;
        let options = read_struct(options, "options")?;
        let fingerprint = fingerprint_of(options.fingerprint)?;
        let tokens = list(options.tokens, options.n_tokens, "tokens")?;
        let mut cache = cache.cache.lock()?;
        target.write(find(&store.0, &mut *cache, Labels { fingerprint, tokens })?);
        Ok(())
    }
}
