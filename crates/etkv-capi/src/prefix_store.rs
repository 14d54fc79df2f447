//! `etkv_prefix_store`: a folder of texts that caches have read.

use std::ffi::c_char;
use std::sync::Arc;

use etkv_core::{Cache, Result};
use etkv_file::{Labels, PrefixStore};

use super::boundary::{boundary, free, out};
use super::cache::etkv_cache;
use super::error::etkv_error;
use super::handle::{self, Object};
use super::saving::{etkv_save_options, given_path, labels_of};

/// A store; see the header.
#[allow(non_camel_case_types)]
pub struct etkv_prefix_store(pub(super) Arc<PrefixStore>);

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
    // SAFETY: the caller keeps the contract above.
    unsafe {
        boundary(error, || {
            let target = out(store, "store")?;
            let opened = PrefixStore::open(given_path(folder, "folder")?, max_bytes)?;
            target.write(handle::give(etkv_prefix_store(Arc::new(opened))));
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
    // SAFETY: the caller keeps the contract above.
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
    // SAFETY: the caller keeps the contract above.
    unsafe {
        boundary(error, || {
            let saved = with_text(store, cache, options, PrefixStore::save)?;
            if !written.is_null() {
                written.write(saved);
            }
            Ok(())
        })
    }
}

/// Loads the longest stored prefix of a text.
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
    // SAFETY: the caller keeps the contract above.
    unsafe {
        boundary(error, || {
            let target = out(n_loaded, "n_loaded")?;
            target.write(with_text(store, cache, options, |store, cache, text| {
                store.load(cache, text.fingerprint, text.tokens)
            })?);
            Ok(())
        })
    }
}

/// Stores how many tokens `etkv_prefix_store_load` would load.
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
    // SAFETY: the caller keeps the contract above.
    unsafe {
        boundary(error, || {
            let target = out(n_stored, "n_stored")?;
            target.write(with_text(store, cache, options, |store, cache, text| {
                store.n_stored(cache, text.fingerprint, text.tokens)
            })?);
            Ok(())
        })
    }
}

/// Returns the result of `work` on a store, a cache and a text.
///
/// # Safety
/// Pointers are NULL or as the header says.
unsafe fn with_text<T>(
    store: *const etkv_prefix_store,
    cache: *const etkv_cache,
    options: *const etkv_save_options,
    work: impl FnOnce(&PrefixStore, &mut dyn Cache, Labels) -> Result<T>,
) -> Result<T> {
    let store = handle::look_up(store, "store")?;
    let cache = handle::look_up(cache, "cache")?;
    // SAFETY: the caller keeps the contract above.
    let text = unsafe { labels_of(options) }?;
    let mut cache = cache.cache.lock()?;
    work(&store.0, &mut *cache, text)
}
