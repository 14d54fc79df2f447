//! `etkv_prefix_store`: a folder of files with the contents of caches, found by their texts.

use std::ffi::c_char;
use std::sync::Arc;

use etkv_core::Result;
use etkv_file::PrefixStore;

use super::boundary::{c_functions, free, out, put};
use super::cache::etkv_cache;
use super::handle::{self, Object};
use super::saving::{etkv_save_options, given_path, with_text};

/// A store; see the header.
#[allow(non_camel_case_types)]
pub struct etkv_prefix_store(pub(super) Arc<PrefixStore>);

impl Object for etkv_prefix_store {
    const NAME: &'static str = "etkv_prefix_store";
}

c_functions!(
    /// Opens a folder.
    unsafe fn etkv_prefix_store_open(
        folder: *const c_char,
        max_bytes: u64,
        store: *mut *mut etkv_prefix_store,
    ) -> Result<()> {
        put(store, "store", || {
            let opened = PrefixStore::open(given_path(folder, "folder")?, max_bytes)?;
            Ok(handle::give(etkv_prefix_store(Arc::new(opened))))
        })
    }

    /// Stores the number of files in the folder, and their bytes.
    unsafe fn etkv_prefix_store_usage(
        store: *const etkv_prefix_store,
        n_files: *mut usize,
        n_bytes: *mut u64,
    ) -> Result<()> {
        let (files, bytes) = (out(n_files, "n_files")?, out(n_bytes, "n_bytes")?);
        let usage = handle::look_up(store, "store")?.0.usage()?;
        files.write(usage.0);
        bytes.write(usage.1);
        Ok(())
    }

    /// Stores the contents of a cache in the folder.
    unsafe fn etkv_prefix_store_save(
        store: *const etkv_prefix_store,
        cache: *const etkv_cache,
        options: *const etkv_save_options,
        written: *mut bool,
    ) -> Result<()> {
        let store = handle::look_up(store, "store")?;
        let saved = with_text(cache, options, |cache, text| store.0.save(cache, text))?;
        if !written.is_null() {
            written.write(saved);
        }
        Ok(())
    }

    /// Loads the longest stored prefix of a text.
    unsafe fn etkv_prefix_store_load(
        store: *const etkv_prefix_store,
        cache: *mut etkv_cache,
        options: *const etkv_save_options,
        n_loaded: *mut usize,
    ) -> Result<()> {
        put(n_loaded, "n_loaded", || {
            let store = handle::look_up(store, "store")?;
            with_text(cache, options, |cache, text| {
                store.0.load(cache, text.fingerprint, text.tokens)
            })
        })
    }

    /// Stores how many tokens `etkv_prefix_store_load` would load.
    unsafe fn etkv_prefix_store_find(
        store: *const etkv_prefix_store,
        cache: *const etkv_cache,
        options: *const etkv_save_options,
        n_stored: *mut usize,
    ) -> Result<()> {
        put(n_stored, "n_stored", || {
            let store = handle::look_up(store, "store")?;
            with_text(cache, options, |cache, text| {
                store.0.n_stored(cache, text.fingerprint, text.tokens)
            })
        })
    }
);

/// Frees a store. The folder stays.
#[no_mangle]
pub extern "C" fn etkv_prefix_store_free(store: *mut etkv_prefix_store) {
    free(store);
}
