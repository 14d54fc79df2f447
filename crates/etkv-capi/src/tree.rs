//! `etkv_tree_cache`: a handle on a cache whose sequences carry trees of candidates.

use etkv_core::{fail, Result, SharedCache, TreeCache};

use super::boundary::{boundary, free, list, out};
use super::cache::etkv_cache;
use super::error::etkv_error;
use super::handle::{self, Object};

/// A handle on a cache of trees of candidates.
#[allow(non_camel_case_types)]
pub struct etkv_tree_cache {
    cache: SharedCache,
}

impl Object for etkv_tree_cache {
    const NAME: &'static str = "etkv_tree_cache";
}

impl etkv_tree_cache {
    /// Makes a handle on this cache, if the cache carries trees.
    pub(super) fn give(cache: SharedCache) -> Result<*mut Self> {
        with_trees(&cache, |_| Ok(()))?;
        Ok(handle::give(Self { cache }))
    }
}

fn with_trees<T>(
    cache: &SharedCache,
    work: impl FnOnce(&mut dyn TreeCache) -> Result<T>,
) -> Result<T> {
    let mut cache = cache.lock()?;
    match cache.trees_mut() {
        Some(trees) => work(trees),
        None => fail!(
            Kind,
            "a cache of kind `{}` carries no trees of candidates; use kind `tree`",
            cache.kind()
        ),
    }
}

/// Makes a handle for trees on the same cache.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_cache_as_tree(
    cache: *const etkv_cache,
    trees: *mut *mut etkv_tree_cache,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller keeps the contract above.
    unsafe {
        boundary(error, || {
            let target = out(trees, "trees")?;
            let cache = handle::look_up(cache, "cache")?;
            target.write(etkv_tree_cache::give(cache.cache.clone())?);
            Ok(())
        })
    }
}

/// Frees a handle.
#[no_mangle]
pub extern "C" fn etkv_tree_cache_free(cache: *mut etkv_tree_cache) {
    free(cache);
}

/// Appends a frontier of candidates to the tree after a sequence.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_tree_cache_propose(
    cache: *mut etkv_tree_cache,
    sequence: i32,
    parents: *const i32,
    n_nodes: usize,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller keeps the contract above.
    unsafe {
        change(cache, error, |cache| cache.propose(sequence, list(parents, n_nodes, "parents")?))
    }
}

/// Adds a chain of candidates to a sequence, and removes the rest of its tree.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_tree_cache_commit(
    cache: *mut etkv_tree_cache,
    sequence: i32,
    accepted: *const i32,
    n_nodes: usize,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller keeps the contract above.
    unsafe {
        change(cache, error, |cache| {
            cache.commit_tree(sequence, list(accepted, n_nodes, "accepted")?)
        })
    }
}

/// Stores the number of nodes of the tree after a sequence.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_tree_cache_len(
    cache: *const etkv_tree_cache,
    sequence: i32,
    n_nodes: *mut usize,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller keeps the contract above.
    unsafe {
        boundary(error, || {
            let n_nodes = out(n_nodes, "n_nodes")?;
            let cache = handle::look_up(cache, "cache")?;
            n_nodes.write(with_trees(&cache.cache, |cache| cache.tree_len(sequence))?);
            Ok(())
        })
    }
}

/// # Safety
/// `error` is NULL or as the header says.
unsafe fn change(
    cache: *const etkv_tree_cache,
    error: *mut *mut etkv_error,
    act: impl FnOnce(&mut dyn TreeCache) -> Result<()>,
) -> i32 {
    // SAFETY: the caller keeps the contract above.
    unsafe {
        boundary(error, || {
            let cache = handle::look_up(cache, "cache")?;
            with_trees(&cache.cache, act)
        })
    }
}
