//! `etkv_tree_cache`: a handle on a cache whose sequences carry trees of candidates.

use etkv_core::{fail, Result, SharedCache, TreeCache};

use super::boundary::{c_functions, free, list, put};
use super::cache::etkv_cache;
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

c_functions!(
    /// Makes a handle on the same cache, as a cache with trees.
    unsafe fn etkv_cache_as_tree(
        cache: *const etkv_cache,
        trees: *mut *mut etkv_tree_cache,
    ) -> Result<()> {
        put(trees, "trees", || {
            etkv_tree_cache::give(handle::look_up(cache, "cache")?.cache.clone())
        })
    }

    /// Appends a frontier of candidates to the tree after a sequence.
    unsafe fn etkv_tree_cache_propose(
        cache: *mut etkv_tree_cache,
        sequence: i32,
        parents: *const i32,
        n_nodes: usize,
    ) -> Result<()> {
        with(cache, |cache| cache.propose(sequence, list(parents, n_nodes, "parents")?))
    }

    /// Adds a chain of candidates to a sequence, and removes the rest of its tree.
    unsafe fn etkv_tree_cache_commit(
        cache: *mut etkv_tree_cache,
        sequence: i32,
        accepted: *const i32,
        n_nodes: usize,
    ) -> Result<()> {
        with(cache, |cache| cache.commit_tree(sequence, list(accepted, n_nodes, "accepted")?))
    }

    /// Stores the number of nodes of the tree after a sequence.
    unsafe fn etkv_tree_cache_len(
        cache: *const etkv_tree_cache,
        sequence: i32,
        n_nodes: *mut usize,
    ) -> Result<()> {
        put(n_nodes, "n_nodes", || with(cache, |cache| cache.tree_len(sequence)))
    }
);

/// Frees a handle.
#[no_mangle]
pub extern "C" fn etkv_tree_cache_free(cache: *mut etkv_tree_cache) {
    free(cache);
}

/// Calls `work` with the cache of a handle.
fn with<T>(
    cache: *const etkv_tree_cache,
    work: impl FnOnce(&mut dyn TreeCache) -> Result<T>,
) -> Result<T> {
    with_trees(&handle::look_up(cache, "cache")?.cache, work)
}
