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
 * The process-wide registry: programs find their caches in it, by key. Sessions
 * use it; call these functions only to choose the keys yourself.
 */

/**
 * Adds a cache under a key, for programs of this backend. The registry keeps
 * the cache until the key is erased. The handle stays the caller's.
 *
 * ETKV_ERROR_INVALID_ARGUMENT where the key is taken or empty.
 */
ETKV_API etkv_status etkv_registry_install(
    const char* key,
    const char* backend_id,
    const etkv_cache* cache,
    etkv_error** error);

/**
 * Stores a handle on the cache under a key. The caller frees it.
 * ETKV_ERROR_NO_CACHE where there is none.
 */
ETKV_API etkv_status
etkv_registry_get(const char* key, etkv_cache** cache, etkv_error** error);

/**
 * Removes a key. The cache lives on while it has other owners.
 * ETKV_ERROR_NO_CACHE where the key is unknown.
 */
ETKV_API etkv_status etkv_registry_erase(const char* key, etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_REGISTRY_H */
