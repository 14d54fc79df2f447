/*
 * Prefix caches: prefixes in memory, by the texts that they hold, which caches
 * of one process share. docs/prefixes.md describes them. A part of etkv.h, whose
 * conventions hold here.
 */
#ifndef ETKV_PREFIX_CACHE_H
#define ETKV_PREFIX_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "etkv/cache.h"
#include "etkv/error.h"
#include "etkv/export.h"
#include "etkv/prefix_store.h"
#include "etkv/saving.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Prefixes by the model's fingerprint, the layers and formats of the cache, and
 * the token ids of the text. Any number of threads may use one.
 */
typedef struct etkv_prefix_cache etkv_prefix_cache;

/** Keeps a prefix in memory until it is freed. */
typedef struct etkv_prefix_pin etkv_prefix_pin;

/** What a prefix cache may hold. */
typedef struct etkv_prefix_cache_options {
  size_t struct_size;
  /**
   * The most bytes of rows that prefixes keep in memory, or 0 for no limit.
   * Those that were used least recently go first. Pinned ones stay.
   */
  uint64_t max_bytes;
  /**
   * A store that is asked for what memory lacks, and to which everything is
   * written that is kept; or NULL. Its handle may be freed afterwards.
   */
  const etkv_prefix_store* store;
} etkv_prefix_cache_options;

/** What a prefix cache holds, and what it was asked for. */
typedef struct etkv_prefix_statistics {
  size_t struct_size;
  /** The prefixes in memory, and those of them that are pinned. */
  size_t n_prefixes;
  size_t n_pinned;
  /** Bytes of their rows. What several have in common counts once. */
  uint64_t n_bytes;
  /** Tokens of the texts that etkv_prefix_cache_attach() got. */
  uint64_t tokens_asked;
  /** Tokens of these that were found in memory, and in the store. */
  uint64_t tokens_in_memory;
  uint64_t tokens_in_store;
  /**
   * Texts that wait to be read ahead, with the one that is read now; those of
   * which something was read ahead into memory, and their tokens; and those that
   * could not be read, for which the log tells why.
   */
  size_t n_ahead_waiting;
  uint64_t n_ahead_read;
  uint64_t tokens_ahead;
  uint64_t n_ahead_failed;
} etkv_prefix_statistics;

/**
 * Makes a prefix cache. The caller frees it with etkv_prefix_cache_free().
 *
 * @param options  NULL for no limit and no store.
 */
ETKV_API etkv_status etkv_prefix_cache_new(
    const etkv_prefix_cache_options* options,
    etkv_prefix_cache** prefixes,
    etkv_error** error);

/**
 * Frees a prefix cache. Caches that read its prefixes keep the rows, and pins
 * keep theirs. Waits for a text that is being read ahead.
 */
ETKV_API void etkv_prefix_cache_free(etkv_prefix_cache* prefixes);

/**
 * Attaches an empty cache to the longest beginning of a text that is kept. The
 * caller runs the rest, at least one token, whose logits it needs: so it passes
 * the text without its last token.
 *
 * Layers with windows can be rewound a little only: a prefix of such a model
 * serves texts that go on near its end. If the store has a longer beginning, the
 * cache loads it, and shares it in memory from then on. A store that fails is
 * passed by, with a warning in the log.
 *
 * @param options     the model's fingerprint, and the text.
 * @param n_attached  receives how many of the first tokens the cache then
 *                    holds.
 *
 * ETKV_ERROR_INVALID_ARGUMENT for no fingerprint, and where the cache is not
 * empty. ETKV_ERROR_STEP while a step is open. ETKV_ERROR_UNSUPPORTED for a kind
 * that the host added. ETKV_ERROR_BACKEND where the cache is poisoned or memory
 * is lacking.
 */
ETKV_API etkv_status etkv_prefix_cache_attach(
    const etkv_prefix_cache* prefixes,
    etkv_cache* cache,
    const etkv_save_options* options,
    size_t* n_attached,
    etkv_error** error);

/**
 * Stores how many tokens etkv_prefix_cache_attach() would attach a cache like
 * this one to, which may hold something.
 */
ETKV_API etkv_status etkv_prefix_cache_find(
    const etkv_prefix_cache* prefixes,
    const etkv_cache* cache,
    const etkv_save_options* options,
    size_t* n_kept,
    etkv_error** error);

/**
 * Keeps the contents of a cache, which goes on from them itself. Prefixes go
 * whose texts this one begins with, if it serves all that they do. The store
 * gets the text too: its file has what users wrote.
 *
 * @param options  the model's fingerprint, and the text of the cache, token by
 *                 token.
 * @param kept     receives whether memory has the text then. It has not if the
 *                 text takes more bytes than there may be, or the cache was
 *                 converted by hand. NULL where it is not wanted.
 *
 * ETKV_ERROR_INVALID_ARGUMENT for no fingerprint, for no tokens, and where the
 * cache does not hold the positions of all tokens; and the errors of
 * etkv_cache_freeze().
 */
ETKV_API etkv_status etkv_prefix_cache_keep(
    const etkv_prefix_cache* prefixes,
    etkv_cache* cache,
    const etkv_save_options* options,
    bool* kept,
    etkv_error** error);

/**
 * Has the longest beginning of a text that the store has read into memory, by a
 * thread of the prefix cache, so that a later etkv_prefix_cache_attach() of a
 * cache like this one finds it there. Waits for nothing, and asks neither the
 * folder nor the network.
 *
 * What is read is a prefix like others: it takes of `max_bytes` and of the
 * memory budget. What cannot be read, also for lack of memory, is counted in
 * etkv_prefix_statistics. Where it is read, etkv_prefix_cache_attach() does not
 * ask the store for this text again for a minute, as long as memory has it. A
 * callback of the memory budget may be called on that thread.
 *
 * @param cache    of the kind, layers and formats that will read the text. It
 *                 may hold something, and does not change.
 * @param options  the model's fingerprint, and the text.
 * @param waits    receives whether the text waits to be read: not if memory has
 *                 all of it, if there is no store, or if 16 others wait. NULL
 *                 where it is not wanted.
 *
 * ETKV_ERROR_INVALID_ARGUMENT for no fingerprint. ETKV_ERROR_UNSUPPORTED for a
 * kind that the host added. ETKV_ERROR_BACKEND where no thread can be started.
 */
ETKV_API etkv_status etkv_prefix_cache_prefetch(
    const etkv_prefix_cache* prefixes,
    const etkv_cache* cache,
    const etkv_save_options* options,
    bool* waits,
    etkv_error** error);

/**
 * Pins a prefix that holds a whole text, for caches like this one: nothing
 * removes it from memory until etkv_prefix_pin_free().
 *
 * ETKV_ERROR_INVALID_ARGUMENT for no fingerprint, and where no prefix has the
 * text.
 */
ETKV_API etkv_status etkv_prefix_cache_pin(
    const etkv_prefix_cache* prefixes,
    const etkv_cache* cache,
    const etkv_save_options* options,
    etkv_prefix_pin** pin,
    etkv_error** error);

/** Unpins a prefix. */
ETKV_API void etkv_prefix_pin_free(etkv_prefix_pin* pin);

/**
 * Frees prefixes that are not pinned and that no cache reads, those that were
 * used least recently first, until `n_bytes` are free.
 *
 * @param freed  receives the bytes that were freed. NULL where it is not wanted.
 */
ETKV_API etkv_status etkv_prefix_cache_reclaim(
    const etkv_prefix_cache* prefixes,
    uint64_t n_bytes,
    uint64_t* freed,
    etkv_error** error);

/** Drops all prefixes that are not pinned. The files of the store stay. */
ETKV_API etkv_status
etkv_prefix_cache_clear(const etkv_prefix_cache* prefixes, etkv_error** error);

/** Fills `statistics`. The caller sets its `struct_size` first. */
ETKV_API etkv_status etkv_prefix_cache_read(
    const etkv_prefix_cache* prefixes,
    etkv_prefix_statistics* statistics,
    etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_PREFIX_CACHE_H */
