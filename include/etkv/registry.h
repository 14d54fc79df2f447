/*
 * Caches by key, for the whole process.
 * A part of etkv.h, whose conventions hold here.
 */
#ifndef ETKV_REGISTRY_H
#define ETKV_REGISTRY_H

#include "etkv/cache.h"
#include "etkv/error.h"
#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Caches by key, for the whole process: where programs find theirs. Sessions do
 * all of this; it is here for hosts that name keys themselves.
 */

/**
 * Makes a cache known under a key, for programs of this backend.
 * ETKV_ERROR_INVALID_ARGUMENT where the key is taken or empty.
 */
ETKV_API etkv_status etkv_registry_install(
    const char* key,
    const char* backend_id,
    const etkv_cache* cache,
    etkv_error** error);

/** Makes a handle on the cache under a key; else ETKV_ERROR_NO_CACHE. */
ETKV_API etkv_status
etkv_registry_get(const char* key, etkv_cache** cache, etkv_error** error);

/** Forgets a key; who shares its cache keeps it. Else ETKV_ERROR_NO_CACHE. */
ETKV_API etkv_status etkv_registry_erase(const char* key, etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_REGISTRY_H */
