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

/** The face of a cache whose sequences carry trees of candidates. */
typedef struct etkv_tree_cache etkv_tree_cache;

/**
 * Makes a handle for trees on the same cache; ETKV_ERROR_KIND, naming its kind,
 * where it has none. The other handle stays.
 */
ETKV_API etkv_status etkv_cache_as_tree(
    const etkv_cache* cache,
    etkv_tree_cache** trees,
    etkv_error** error);

/** Gives back the handle; the cache lives on while others hold it. */
ETKV_API void etkv_tree_cache_free(etkv_tree_cache* cache);

/**
 * Appends a frontier of candidates to the tree behind a sequence: the queries of
 * its next step. Each sees the sequence, its ancestors and itself. A parent is
 * the number of an earlier node of the tree, over all its frontiers, or -1 for
 * the sequence itself. A node's position is the sequence's next and its depth.
 *
 * ETKV_ERROR_INVALID_ARGUMENT for no nodes or a parent that is no node before,
 * ETKV_ERROR_STEP where the last frontier has not been run, and
 * ETKV_ERROR_CAPACITY.
 */
ETKV_API etkv_status etkv_tree_cache_propose(
    etkv_tree_cache* cache,
    int32_t sequence,
    const int32_t* parents,
    size_t n_nodes,
    etkv_error** error);

/**
 * Makes a chain of candidates, from a child of the sequence down, part of it,
 * and forgets the rest of its tree; no nodes forget all of it.
 *
 * ETKV_ERROR_INVALID_ARGUMENT where there is no tree, or the nodes are no chain
 * of nodes that were run. After ETKV_ERROR_BACKEND, where rows were moved already,
 * the cache is poisoned until it is cleared.
 */
ETKV_API etkv_status etkv_tree_cache_commit(
    etkv_tree_cache* cache,
    int32_t sequence,
    const int32_t* accepted,
    size_t n_nodes,
    etkv_error** error);

/** Stores the nodes of the tree behind a sequence; 0 where there is none. */
ETKV_API etkv_status etkv_tree_cache_len(
    const etkv_tree_cache* cache,
    int32_t sequence,
    size_t* n_nodes,
    etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_TREE_H */
