/*
 * Trees of candidates behind sequences.
 * A part of etkv.h, whose conventions hold here.
 */
#ifndef ETKV_TREE_H
#define ETKV_TREE_H

#include <stddef.h>
#include <stdint.h>

#include "etkv/cache.h"
#include "etkv/error.h"
#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/** A handle on a cache whose sequences carry trees of candidates. */
typedef struct etkv_tree_cache etkv_tree_cache;

/**
 * Stores a handle for trees on the same cache, which the caller frees with
 * etkv_tree_cache_free(). The handle `cache` stays valid. ETKV_ERROR_KIND where
 * the cache carries no trees; the message names its kind.
 */
ETKV_API etkv_status etkv_cache_as_tree(
    const etkv_cache* cache,
    etkv_tree_cache** trees,
    etkv_error** error);

/** Frees the handle. The cache lives on while it has other owners. */
ETKV_API void etkv_tree_cache_free(etkv_tree_cache* cache);

/**
 * Appends a frontier of candidates to the tree behind a sequence: the queries
 * of its next step. Each query sees the sequence, its ancestors and itself. A
 * node's position is the sequence's next position plus its depth.
 *
 * @param sequence  the number of the sequence, 0 to 255.
 * @param parents   the parent of each of the `n_nodes` new nodes: the number of
 *                  an earlier node of the tree, over all its frontiers, or -1
 *                  for the sequence itself. Copied.
 *
 * ETKV_ERROR_INVALID_ARGUMENT where `n_nodes` is 0 or a parent is no earlier
 * node, ETKV_ERROR_STEP where the last frontier has not run or a step is open,
 * and ETKV_ERROR_CAPACITY where the frontier does not fit.
 */
ETKV_API etkv_status etkv_tree_cache_propose(
    etkv_tree_cache* cache,
    int32_t sequence,
    const int32_t* parents,
    size_t n_nodes,
    etkv_error** error);

/**
 * Adds a chain of candidates to the sequence, and removes the rest of its tree.
 *
 * @param accepted  the numbers of `n_nodes` nodes that ran, from a child of the
 *                  sequence down. None of them, NULL and 0, removes the whole
 *                  tree.
 *
 * ETKV_ERROR_INVALID_ARGUMENT where there is no tree, or the nodes are no chain
 * of nodes that ran. ETKV_ERROR_STEP while a step is open. After
 * ETKV_ERROR_BACKEND, where rows had moved already, the cache is poisoned until
 * it is cleared.
 */
ETKV_API etkv_status etkv_tree_cache_commit(
    etkv_tree_cache* cache,
    int32_t sequence,
    const int32_t* accepted,
    size_t n_nodes,
    etkv_error** error);

/**
 * Stores the number of nodes of the tree behind a sequence; 0 without a tree.
 */
ETKV_API etkv_status etkv_tree_cache_len(
    const etkv_tree_cache* cache,
    int32_t sequence,
    size_t* n_nodes,
    etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_TREE_H */
