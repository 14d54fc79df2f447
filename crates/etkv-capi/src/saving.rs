//! The contents of caches in files, and back.

use std::ffi::c_char;
use std::path::Path;

use etkv_core::{fail, Cache, Result, SharedCache};
use etkv_file::Labels;

use super::boundary::{c_functions, list, put, read_struct, text};
use super::cache::etkv_cache;
use super::handle;
use super::report::string;
use super::seq::etkv_seq_cache;

/// The options of saving a cache; see the header.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy)]
pub struct etkv_save_options {
    struct_size: usize,
    fingerprint: *const c_char,
    tokens: *const i64,
    n_tokens: usize,
}

c_functions!(
    /// Writes the contents of a cache to a file.
    unsafe fn etkv_cache_save(
        cache: *const etkv_cache,
        path: *const c_char,
        options: *const etkv_save_options,
    ) -> Result<()> {
        let cache = handle::look_up(cache, "cache")?;
        save(&cache.cache, path, options, etkv_file::save)
    }

    /// Replaces the contents of a cache by those of a file.
    unsafe fn etkv_cache_load(
        cache: *mut etkv_cache,
        path: *const c_char,
        fingerprint: *const c_char,
        tokens: *mut *mut i64,
        n_tokens: *mut usize,
    ) -> Result<()> {
        let cache = handle::look_up(cache, "cache")?;
        load(&cache.cache, path, fingerprint, (tokens, n_tokens), etkv_file::load)
    }

    /// Writes one sequence to a file.
    unsafe fn etkv_seq_cache_save(
        cache: *const etkv_seq_cache,
        sequence: i32,
        path: *const c_char,
        options: *const etkv_save_options,
    ) -> Result<()> {
        let cache = handle::look_up(cache, "cache")?;
        save(cache.shared(), path, options, |cache, path, labels| {
            etkv_file::save_sequence(cache, sequence, path, labels)
        })
    }

    /// Adds the only sequence of a file to the cache.
    unsafe fn etkv_seq_cache_load(
        cache: *mut etkv_seq_cache,
        sequence: i32,
        path: *const c_char,
        fingerprint: *const c_char,
        tokens: *mut *mut i64,
        n_tokens: *mut usize,
    ) -> Result<()> {
        let cache = handle::look_up(cache, "cache")?;
        load(cache.shared(), path, fingerprint, (tokens, n_tokens), |cache, path, model| {
            etkv_file::load_sequence(cache, sequence, path, model)
        })
    }

    /// Stores the fingerprint of a file.
    unsafe fn etkv_fingerprint(path: *const c_char, fingerprint: *mut *mut c_char) -> Result<()> {
        put(fingerprint, "fingerprint", || {
            string(etkv_file::fingerprint(given_path(path, "path")?)?)
        })
    }
);

/// Saves a cache, or a part of it, with `save`.
///
/// # Safety
/// Pointers are NULL or as the header says.
unsafe fn save(
    cache: &SharedCache,
    path: *const c_char,
    options: *const etkv_save_options,
    save: impl FnOnce(&mut dyn Cache, &Path, Labels) -> Result<()>,
) -> Result<()> {
    // SAFETY: the caller keeps the contract above.
    let (path, labels) = unsafe {
        let path = given_path(path, "path")?;
        let labels = match options.is_null() {
            true => Labels::default(),
            false => labels_of(options)?,
        };
        (path, labels)
    };
    save(&mut *cache.lock()?, path, labels)
}

/// Loads a file with `load`, and stores its token ids if the caller wants them.
///
/// # Safety
/// Pointers are NULL or as the header says.
unsafe fn load(
    cache: &SharedCache,
    path: *const c_char,
    fingerprint: *const c_char,
    (tokens, n_tokens): (*mut *mut i64, *mut usize),
    load: impl FnOnce(&mut dyn Cache, &Path, &str) -> Result<Vec<i64>>,
) -> Result<()> {
    // SAFETY: the caller keeps the contract above.
    unsafe {
        let path = given_path(path, "path")?;
        let fingerprint = fingerprint_of(fingerprint)?;
        if tokens.is_null() != n_tokens.is_null() {
            fail!(InvalidArgument, "expected tokens and n_tokens, got one of them as NULL");
        }
        let found = load(&mut *cache.lock()?, path, fingerprint)?;
        if !tokens.is_null() {
            n_tokens.write(found.len());
            tokens.write(Box::into_raw(found.into_boxed_slice()).cast());
        }
        Ok(())
    }
}

/// Frees token ids.
///
/// # Safety
/// `tokens` is NULL, or a list of `n_tokens` that [`etkv_cache_load`] or [`etkv_seq_cache_load`] stored and that is
/// not freed yet.
#[no_mangle]
pub unsafe extern "C" fn etkv_tokens_free(tokens: *mut i64, n_tokens: usize) {
    if !tokens.is_null() {
        // SAFETY: the caller keeps the contract above.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(tokens, n_tokens)) });
    }
}

/// Returns the result of `work` on a cache and a text.
///
/// # Safety
/// Pointers are NULL or as the header says.
pub(super) unsafe fn with_text<T>(
    cache: *const etkv_cache,
    options: *const etkv_save_options,
    work: impl FnOnce(&mut dyn Cache, Labels) -> Result<T>,
) -> Result<T> {
    let cache = handle::look_up(cache, "cache")?;
    // SAFETY: the caller keeps the contract above.
    let text = unsafe { labels_of(options) }?;
    let mut cache = cache.cache.lock()?;
    work(&mut *cache, text)
}

/// # Safety
/// `path` is NULL or a string that ends in a zero byte.
pub(crate) unsafe fn given_path<'a>(path: *const c_char, name: &str) -> Result<&'a Path> {
    // SAFETY: the caller keeps the contract above.
    let path = unsafe { text(path, name) }?;
    if path.is_empty() {
        fail!(InvalidArgument, "{name} is empty");
    }
    Ok(Path::new(path))
}

/// # Safety
/// `options` is NULL, or as the header says.
unsafe fn labels_of<'a>(options: *const etkv_save_options) -> Result<Labels<'a>> {
    // SAFETY: the caller keeps the contract above.
    unsafe {
        let options = read_struct(options, "options")?;
        let fingerprint = fingerprint_of(options.fingerprint)?;
        let tokens = list(options.tokens, options.n_tokens, "tokens")?;
        Ok(Labels { fingerprint, tokens })
    }
}

/// # Safety
/// `fingerprint` is NULL or a string that ends in a zero byte.
unsafe fn fingerprint_of<'a>(fingerprint: *const c_char) -> Result<&'a str> {
    if fingerprint.is_null() {
        return Ok("");
    }
    // SAFETY: the caller keeps the contract above.
    unsafe { text(fingerprint, "fingerprint") }
}
