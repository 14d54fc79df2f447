/*
 * Kinds of caches.
 * A part of etkv.h, whose conventions hold here.
 */
#ifndef ETKV_KINDS_H
#define ETKV_KINDS_H

#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * The kind of a cache decides what it can do. It is fixed when the cache is
 * made.
 *
 *   "contiguous"  one growing sequence; the fastest kind for one
 *   "seq"         up to 256 sequences that share cells: forks, removal, batches
 *   "tree"        as "seq", with trees of candidates behind sequences
 */

/**
 * Calls `visit` once for each kind, in order of backend id and name. `context`
 * is passed on. The strings live as long as the call. Does nothing where
 * `visit` is NULL.
 */
ETKV_API void etkv_kinds(
    void (*visit)(void* context, const char* backend_id, const char* kind),
    void* context);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_KINDS_H */
