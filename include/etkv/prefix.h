/*
 * Prefixes: what a cache holds, frozen, for any number of caches to go on from
 * without a copy. docs/prefixes.md describes them. A part of etkv.h, whose
 * conventions hold here.
 */
#ifndef ETKV_PREFIX_H
#define ETKV_PREFIX_H

#include <stdint.h>

#include "etkv/cache.h"
#include "etkv/error.h"
#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * A sequence from position 0 on, read-only, for any number of threads. Its rows
 * are freed when it and every cache that reads them are gone, in any order.
 */
typedef struct etkv_prefix etkv_prefix;

/**
 * Freezes what a cache holds, and goes on from it itself. Rows move to memory
 * that caches read together, one layer at a time; those that the cache already
 * reads from a prefix stay where they are. The caller frees the prefix with
 * etkv_prefix_free().
 *
 * ETKV_ERROR_INVALID_ARGUMENT where the cache is empty, or holds anything but
 * sequence 0 from position 0 on, without candidates and gaps. ETKV_ERROR_STEP
 * while a step is open. ETKV_ERROR_UNSUPPORTED for a kind that the host added
 * and a backend that shares no memory. ETKV_ERROR_BACKEND where the cache is
 * poisoned or memory is lacking. The contents are then as before.
 */
ETKV_API etkv_status
etkv_cache_freeze(etkv_cache* cache, etkv_prefix** prefix, etkv_error** error);

/**
 * Makes an empty cache hold the first `length` positions of a prefix. No rows
 * are copied. What the cache writes behind them is its own. Caches of every
 * kind take each other's prefixes.
 *
 * @param length  from etkv_prefix_rewindable_to() to etkv_prefix_length().
 *
 * ETKV_ERROR_INVALID_ARGUMENT where the cache is not empty, for another length,
 * and for a prefix of other layers, formats, windows or another backend, or
 * longer than the capacity. ETKV_ERROR_STEP while a step is open.
 * ETKV_ERROR_UNSUPPORTED and ETKV_ERROR_BACKEND as for etkv_cache_freeze().
 * Nothing has changed then.
 */
ETKV_API etkv_status etkv_cache_attach(
    etkv_cache* cache,
    const etkv_prefix* prefix,
    int32_t length,
    etkv_error** error);

/** Returns the number of positions, or -1 where `prefix` is no live handle. */
ETKV_API int32_t etkv_prefix_length(const etkv_prefix* prefix);

/**
 * Returns the least length that a cache can attach at. It is more than 1 where
 * layers with windows have dropped what an earlier query would see. -1 where
 * `prefix` is no live handle.
 */
ETKV_API int32_t etkv_prefix_rewindable_to(const etkv_prefix* prefix);

/**
 * Returns the bytes of the rows, without those that lie in the prefix which the
 * cache had gone on from. 0 where `prefix` is no live handle.
 */
ETKV_API uint64_t etkv_prefix_bytes(const etkv_prefix* prefix);

/** Frees a handle. Caches that read the rows keep them. */
ETKV_API void etkv_prefix_free(etkv_prefix* prefix);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_PREFIX_H */
