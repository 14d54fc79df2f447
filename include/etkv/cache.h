/*
 * A cache: the face that every kind has.
 * A part of etkv.h, whose conventions hold here.
 */
#ifndef ETKV_CACHE_H
#define ETKV_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "etkv/config.h"
#include "etkv/error.h"
#include "etkv/export.h"
#include "etkv/memory.h"

#ifdef __cplusplus
extern "C" {
#endif

/** A cache: the face that every kind has. */
typedef struct etkv_cache etkv_cache;

/**
 * Makes a cache that no key leads to yet. Most callers want a session.
 *
 * @param backend_id  the backend that will use it: "MLXBackend".
 * @param kind        a name of etkv_kinds().
 * @param config      what it is to be.
 */
ETKV_API etkv_status etkv_cache_new(
    const char* backend_id,
    const char* kind,
    const etkv_cache_config* config,
    etkv_cache** cache,
    etkv_error** error);

/** Gives back the handle; the cache lives on while others hold it. */
ETKV_API void etkv_cache_free(etkv_cache* cache);

/**
 * Makes another handle on the same cache, for another owner. NULL if `cache` is no
 * live handle.
 */
ETKV_API etkv_cache* etkv_cache_share(const etkv_cache* cache);

/** Stores whether `n` (at least 0) more positions fit. */
ETKV_API etkv_status etkv_cache_can_extend(
    const etkv_cache* cache,
    int32_t n,
    bool* fits,
    etkv_error** error);

/**
 * The most positions that it holds, at least 1; 0 if `cache` is no live handle.
 * Like its layers and its kind, it is known while others have the cache.
 */
ETKV_API int32_t etkv_cache_capacity(const etkv_cache* cache);

/**
 * Stores the positions that it holds now. One that several sequences share
 * counts once.
 */
ETKV_API etkv_status
etkv_cache_length(const etkv_cache* cache, int32_t* length, etkv_error** error);

/** The number of its layers, at least 1; 0 if `cache` is no live handle. */
ETKV_API size_t etkv_cache_n_layers(const etkv_cache* cache);

/** The name of its kind, static; NULL if `cache` is no live handle. */
ETKV_API const char* etkv_cache_kind(const etkv_cache* cache);

/** Stores the names of the formats that its rows have now. Static. */
ETKV_API etkv_status etkv_cache_formats(
    const etkv_cache* cache,
    const char** k_format,
    const char** v_format,
    etkv_error** error);

/**
 * Stores what is there, and what comes, in other formats, until the cache is
 * cleared. One layer's keys or values at a time: it takes the memory of one of
 * them besides.
 *
 * After ETKV_ERROR_BACKEND some layers may be converted and others not, all of them
 * whole; call again to go on.
 */
ETKV_API etkv_status etkv_cache_convert(
    etkv_cache* cache,
    const char* k_format,
    const char* v_format,
    etkv_error** error);

/**
 * Forgets every position. The formats are those of the config again.
 *
 * @param release  whether to give the buffers back, too; otherwise the next
 *                 sequence reuses them.
 */
ETKV_API etkv_status
etkv_cache_clear(etkv_cache* cache, bool release, etkv_error** error);

/**
 * Forgets the positions from `length` on, of the one sequence that there is;
 * 0 <= length <= its next position. Where layers have windows, what they have
 * dropped cannot be gone back to: that is refused with ETKV_ERROR_POSITION,
 * naming the least length. Several sequences are ETKV_ERROR_INVALID_ARGUMENT.
 */
ETKV_API etkv_status
etkv_cache_rewind(etkv_cache* cache, int32_t length, etkv_error** error);

/** Stores the least length, apart from 0, that it can be rewound to now. */
ETKV_API etkv_status etkv_cache_rewindable_to(
    const etkv_cache* cache,
    int32_t* length,
    etkv_error** error);

/** Fills `memory`, whose `struct_size` the caller has set. */
ETKV_API etkv_status etkv_cache_memory(
    const etkv_cache* cache,
    etkv_memory* memory,
    etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_CACHE_H */
