/*
 * A cache, and the functions that every kind has. A part of etkv.h, whose
 * conventions apply here.
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

/** A handle to a cache of any kind. */
typedef struct etkv_cache etkv_cache;

/**
 * Makes a cache that is not in the registry. Programs find it by a key only
 * after etkv_registry_install(). Most callers want etkv_session_new() instead.
 *
 * @param backend_id  the backend that uses the cache, such as "MLXBackend".
 * @param kind        a name that etkv_kinds() reports for that backend.
 * @param config      the layers, the capacity and the storage; copied.
 * @param cache       receives a handle. The caller frees the handle with
 *                    etkv_cache_free().
 *
 * ETKV_ERROR_KIND for an unknown kind, ETKV_ERROR_INVALID_ARGUMENT for a config
 * that is not valid.
 */
ETKV_API etkv_status etkv_cache_new(
    const char* backend_id,
    const char* kind,
    const etkv_cache_config* config,
    etkv_cache** cache,
    etkv_error** error);

/** Frees the handle. The cache lives on while it has other owners. */
ETKV_API void etkv_cache_free(etkv_cache* cache);

/**
 * Returns another handle to the same cache. The caller frees the new handle
 * with etkv_cache_free(). Returns NULL if `cache` is no live handle.
 */
ETKV_API etkv_cache* etkv_cache_share(const etkv_cache* cache);

/** Stores in `fits` whether `n` more positions fit. `n` is at least 0. */
ETKV_API etkv_status etkv_cache_can_extend(
    const etkv_cache* cache,
    int32_t n,
    bool* fits,
    etkv_error** error);

/**
 * Returns the maximum number of positions in the cache, at least 1. Returns 0
 * if `cache` is no live handle. The capacity, the number of layers, the maximum
 * tokens of a step and the kind are facts: the functions that return them wait
 * neither for a step nor for another call on the cache.
 */
ETKV_API int32_t etkv_cache_capacity(const etkv_cache* cache);

/**
 * Stores the number of positions that the cache holds now. A position that
 * several sequences share counts once.
 */
ETKV_API etkv_status
etkv_cache_length(const etkv_cache* cache, int32_t* length, etkv_error** error);

/**
 * Returns the number of attention layers. It is 0 only in a cache with
 * recurrent layers. Returns 0 if `cache` is no live handle.
 */
ETKV_API size_t etkv_cache_n_layers(const etkv_cache* cache);

/**
 * Returns the number of recurrent layers. Returns 0 if `cache` is no live
 * handle.
 */
ETKV_API size_t etkv_cache_n_recurrent_layers(const etkv_cache* cache);

/**
 * Returns the maximum number of tokens in one step: `max_step_tokens` of the
 * config if a window slides or `quantized_kv_start` is set, and otherwise the
 * capacity. A program may accept fewer. Returns 0 if `cache` is no live handle.
 */
ETKV_API int32_t etkv_cache_max_step_tokens(const etkv_cache* cache);

/**
 * Returns the name of the kind, a static string. Returns NULL if `cache` is no
 * live handle.
 */
ETKV_API const char* etkv_cache_kind(const etkv_cache* cache);

/**
 * Stores the names of the formats that keys and values have now. The strings
 * are static.
 */
ETKV_API etkv_status etkv_cache_formats(
    const etkv_cache* cache,
    const char** k_format,
    const char** v_format,
    etkv_error** error);

/**
 * Converts the stored rows to other formats, and stores later rows in these
 * formats until the cache is cleared. The keys or the values of one layer are
 * converted at a time, so the call needs additional memory for these only.
 *
 * @param k_format  the name of a format of etkv/config.h, for keys.
 * @param v_format  the same for values.
 *
 * ETKV_ERROR_STEP while a step is open. After ETKV_ERROR_BACKEND some layers
 * may be converted and others not. Every layer is intact; call again to convert
 * the rest.
 */
ETKV_API etkv_status etkv_cache_convert(
    etkv_cache* cache,
    const char* k_format,
    const char* v_format,
    etkv_error** error);

/**
 * Removes every position, and restores the formats of the config. A cache that
 * ETKV_ERROR_BACKEND poisoned becomes usable again.
 *
 * @param release  true frees the buffers too; false keeps them for the next
 *                 sequence.
 *
 * ETKV_ERROR_STEP while a step is open. ETKV_ERROR_BACKEND if there is too
 * little memory for buffers that are allocated upfront.
 */
ETKV_API etkv_status
etkv_cache_clear(etkv_cache* cache, bool release, etkv_error** error);

/**
 * Removes the positions at or after `length`, in a cache that holds one
 * sequence. `length` is from 0 to the sequence's next position.
 *
 * ETKV_ERROR_POSITION for a length outside this range, and if layers with
 * windows have dropped positions that the shorter sequence needs; the message
 * names the smallest length. ETKV_ERROR_INVALID_ARGUMENT if the cache holds
 * several sequences. ETKV_ERROR_STEP while a step is open.
 */
ETKV_API etkv_status
etkv_cache_rewind(etkv_cache* cache, int32_t length, etkv_error** error);

/**
 * Stores the smallest length such that etkv_cache_rewind() accepts it and every
 * greater length of the sequence. It is 0 if no layer has dropped a position.
 * etkv_cache_rewind() always accepts 0. ETKV_ERROR_INVALID_ARGUMENT if the
 * cache holds several sequences.
 */
ETKV_API etkv_status etkv_cache_rewindable_to(
    const etkv_cache* cache,
    int32_t* length,
    etkv_error** error);

/**
 * Stores in `reachable` the greatest length, at most `position`, that
 * etkv_cache_rewind() accepts now. etkv_cache_rewind() accepts 0, the
 * checkpoints of etkv_cache_mark(), and every length of the sequence that is at
 * least etkv_cache_rewindable_to(). A host that rewinds to `reachable` must run
 * the tokens after it again.
 *
 * ETKV_ERROR_POSITION if `position` is negative. ETKV_ERROR_INVALID_ARGUMENT if
 * the cache holds several sequences.
 */
ETKV_API etkv_status etkv_cache_reachable(
    const etkv_cache* cache,
    int32_t position,
    int32_t* reachable,
    etkv_error** error);

/**
 * Makes a checkpoint of the only sequence at `position`: at once if the
 * sequence can be rewound there, and otherwise when a step reaches it. Mark the
 * positions to which the text may return, such as the end of a system prompt,
 * before the step that crosses them.
 *
 * @param position  in a cache with recurrent layers, the checkpoint lies at the
 *                  greatest multiple of 64 that is not above it.
 * @param marked    receives the position of the checkpoint, or 0 if the cache
 *                  makes no checkpoint. A sequence can always be rewound to 0.
 *
 * If the cache has the maximum number of checkpoints, a new one replaces the
 * least useful one: a checkpoint that saves few tokens and has been unused for
 * a long time. A checkpoint is dropped when the text before it is removed.
 *
 * ETKV_ERROR_POSITION if `position` is negative, or can no longer be reached.
 * ETKV_ERROR_INVALID_ARGUMENT if the cache holds several sequences.
 * ETKV_ERROR_STEP while a step is open. ETKV_ERROR_UNSUPPORTED for a cache that
 * makes no checkpoints: one of kind "contiguous" with window layers and no
 * recurrent ones, or of a kind that Rust code added.
 */
ETKV_API etkv_status etkv_cache_mark(
    etkv_cache* cache,
    int32_t position,
    int32_t* marked,
    etkv_error** error);

/**
 * Makes checkpoints where the prompt of a chat turn begins, which is the
 * current length, and where it will end. Call it before the prompt runs. Later
 * requests of the chat can then continue from the end of the prompt, whatever
 * the answer was. Requests that change the first message of this prompt can
 * continue from its beginning. Does nothing for a model without recurrent
 * layers.
 *
 * @param end  the length of the sequence after the prompt.
 *
 * The errors are those of etkv_cache_mark(), except ETKV_ERROR_POSITION: a
 * position that can no longer be marked is skipped.
 */
ETKV_API etkv_status
etkv_cache_mark_turn(etkv_cache* cache, int32_t end, etkv_error** error);

/**
 * Rewinds the only sequence to the greatest length, at most `length`, that
 * etkv_cache_rewind() accepts. Call it before you run a text whose first
 * `length` tokens are in the cache. If the sequence becomes shorter than
 * `length`, the call also marks `length`, as etkv_cache_mark() does. A later
 * text that has the same first `length` tokens then runs fewer of them again.
 *
 * @param reached  receives the length of the sequence.
 *
 * The errors are those of etkv_cache_reachable() and etkv_cache_rewind().
 */
ETKV_API etkv_status etkv_cache_rewind_to_reachable(
    etkv_cache* cache,
    int32_t length,
    int32_t* reached,
    etkv_error** error);

/**
 * Fills `memory` with the bytes of the cache's buffers. The caller sets its
 * `struct_size` first.
 */
ETKV_API etkv_status etkv_cache_memory(
    const etkv_cache* cache,
    etkv_memory* memory,
    etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_CACHE_H */
