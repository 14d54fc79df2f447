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
 * What a cache can do is its kind, which is fixed when it is made:
 *
 *   "contiguous"  one growing sequence; the shortest way for one
 *   "seq"         up to 256 sequences that share cells: forks, removal, batches
 *   "tree"        the same, with trees of candidates behind sequences
 */

/**
 * Calls `visit` with each kind that caches can be made of, and the backend id
 * that it is registered under, in order. The names live for the call. Does
 * nothing where `visit` is NULL.
 */
ETKV_API void etkv_kinds(
    void (*visit)(void* context, const char* backend_id, const char* kind),
    void* context);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_KINDS_H */
