/*
 * A cache, and the key under which programs find it.
 * A part of etkv.h, whose conventions hold here.
 */
#ifndef ETKV_SESSION_H
#define ETKV_SESSION_H

#include "etkv/cache.h"
#include "etkv/config.h"
#include "etkv/error.h"
#include "etkv/export.h"
#include "etkv/seq.h"
#include "etkv/tree.h"

#ifdef __cplusplus
extern "C" {
#endif

/** A cache, and the key under which programs find it. */
typedef struct etkv_session etkv_session;

/** Makes a cache, as etkv_cache_new() does, and registers it under a new key. */
ETKV_API etkv_status etkv_session_new(
    const char* backend_id,
    const char* kind,
    const etkv_cache_config* config,
    etkv_session** session,
    etkv_error** error);

/** Takes the key out of the registry. Programs bound to the cache keep it. */
ETKV_API void etkv_session_free(etkv_session* session);

/**
 * The key, valid until the session is freed; NULL if `session` is no live handle.
 * A program is loaded with it as the backend option `cache_key`.
 */
ETKV_API const char* etkv_session_key(const etkv_session* session);

/** Makes a handle on the session's cache. NULL if `session` is no live handle. */
ETKV_API etkv_cache* etkv_session_cache(const etkv_session* session);

/** The same as the face for sequences: see etkv_cache_as_seq(). */
ETKV_API etkv_status etkv_session_seq(
    const etkv_session* session,
    etkv_seq_cache** cache,
    etkv_error** error);

/** The same as the face for trees: see etkv_cache_as_tree(). */
ETKV_API etkv_status etkv_session_tree(
    const etkv_session* session,
    etkv_tree_cache** cache,
    etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_SESSION_H */
