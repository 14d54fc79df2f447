/*
 * Kinds of caches, and the keys under which programs find caches.
 * A part of etkv.h, whose conventions apply here.
 */
#ifndef ETKV_SESSION_H
#define ETKV_SESSION_H

#include "etkv/cache.h"
#include "etkv/config.h"
#include "etkv/error.h"
#include "etkv/export.h"
#include "etkv/seq.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Kinds ------------------------------------------------------------- */

/*
 * The kind of a cache decides what the cache can do. The kind is fixed when the
 * cache is made.
 *
 *   "contiguous"  one growing sequence; the fastest kind for one sequence
 *   "seq"         up to 256 sequences that share cells: forks, removal, batches
 *   "tree"        like "seq", and sequences can carry trees of candidates
 */

/**
 * Calls `visit` once for each kind, in order of backend id and name. `visit`
 * receives `context`. The strings live as long as the call. Does nothing if
 * `visit` is NULL.
 */
ETKV_API void etkv_kinds(
    void (*visit)(void* context, const char* backend_id, const char* kind),
    void* context);

/* ---- Sessions ---------------------------------------------------------- */

/**
 * A session: a cache, registered under a key for as long as the session lives.
 */
typedef struct etkv_session etkv_session;

/**
 * Makes a cache as etkv_cache_new() does, and registers it under a new key. The
 * caller frees the session with etkv_session_free().
 */
ETKV_API etkv_status etkv_session_new(
    const char* backend_id,
    const char* kind,
    const etkv_cache_config* config,
    etkv_session** session,
    etkv_error** error);

/**
 * Frees the session and removes its key from the registry. Programs that are
 * bound to the cache keep the cache.
 */
ETKV_API void etkv_session_free(etkv_session* session);

/**
 * Returns the key. Load a program with it as the backend option `cache_key`.
 * The string lives until the session is freed. Returns NULL if `session` is no
 * live handle.
 */
ETKV_API const char* etkv_session_key(const etkv_session* session);

/**
 * Returns a new handle to the session's cache. The caller frees the handle.
 * Returns NULL if `session` is no live handle.
 */
ETKV_API etkv_cache* etkv_session_cache(const etkv_session* session);

/**
 * Stores a new handle to the session's cache, as a cache of several sequences.
 * The caller frees the handle. See etkv_cache_as_seq() for the errors.
 */
ETKV_API etkv_status etkv_session_seq(
    const etkv_session* session,
    etkv_seq_cache** cache,
    etkv_error** error);

/**
 * Stores a new handle to the session's cache, as a cache with trees. The caller
 * frees the handle. See etkv_cache_as_tree() for the errors.
 */
ETKV_API etkv_status etkv_session_tree(
    const etkv_session* session,
    etkv_tree_cache** cache,
    etkv_error** error);

/* ---- The registry ------------------------------------------------------ */

/*
 * The process-wide registry: programs find their caches in it, by key. Sessions
 * use it; call these functions only to choose the keys yourself.
 */

/**
 * Adds a cache under a key, for programs of this backend. The registry keeps
 * the cache until the key is erased. The caller still owns its handle.
 *
 * ETKV_ERROR_INVALID_ARGUMENT if the key is taken or empty.
 */
ETKV_API etkv_status etkv_registry_install(
    const char* key,
    const char* backend_id,
    const etkv_cache* cache,
    etkv_error** error);

/**
 * Stores a handle to the cache that is registered under a key. The caller frees
 * the handle. ETKV_ERROR_NO_CACHE if no cache has this key.
 */
ETKV_API etkv_status
etkv_registry_get(const char* key, etkv_cache** cache, etkv_error** error);

/**
 * Removes a key. The cache lives on while it has other owners.
 * ETKV_ERROR_NO_CACHE if the key is unknown.
 */
ETKV_API etkv_status etkv_registry_erase(const char* key, etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_SESSION_H */
