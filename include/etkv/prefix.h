/*
 * Prefixes: frozen contents of caches, from which other caches continue.
 * docs/prefixes.md describes prefixes. A part of etkv.h, whose conventions
 * apply here.
 *
 *   etkv_prefix        the frozen contents of a cache
 *   etkv_prefix_store  beginnings of texts in a folder or a bucket
 *   etkv_prefix_cache  prefixes in memory by their texts, over a store or none
 */
#ifndef ETKV_PREFIX_H
#define ETKV_PREFIX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "etkv/cache.h"
#include "etkv/error.h"
#include "etkv/export.h"
#include "etkv/saving.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Frozen contents of a cache ---------------------------------------- */

/**
 * A read-only sequence that begins at position 0, for any number of threads.
 * Its rows are freed when the prefix and all caches that read the rows are
 * gone, in any order.
 */
typedef struct etkv_prefix etkv_prefix;

/**
 * Freezes the contents of a cache. The cache continues from the frozen
 * contents. Rows move to memory that caches share, one layer at a time. Rows
 * that the cache already reads from a prefix stay where they are. The caller
 * frees the prefix with etkv_prefix_free().
 *
 * ETKV_ERROR_INVALID_ARGUMENT if the cache is empty, if it holds a sequence
 * other than 0, or if sequence 0 has candidates, gaps or no position 0.
 * ETKV_ERROR_STEP while a step is open. ETKV_ERROR_UNSUPPORTED for a kind that
 * Rust code added, and for a backend that cannot share memory.
 * ETKV_ERROR_BACKEND if the cache is poisoned or memory runs out. After an
 * error the contents are as before.
 */
ETKV_API etkv_status
etkv_cache_freeze(etkv_cache* cache, etkv_prefix** prefix, etkv_error** error);

/**
 * Makes an empty cache hold the first `length` positions of a prefix. No rows
 * are copied. Rows that the cache writes after these positions are its own.
 * Caches of every kind accept each other's prefixes.
 *
 * @param length  from etkv_prefix_rewindable_to() to etkv_prefix_length(), or a
 *                checkpoint of the prefix.
 *
 * ETKV_ERROR_INVALID_ARGUMENT if the cache is not empty, and for any other
 * `length`. The same error if the prefix differs from the cache in layers,
 * formats, windows or backend, or is longer than the cache's capacity.
 * ETKV_ERROR_STEP while a step is open. ETKV_ERROR_UNSUPPORTED and
 * ETKV_ERROR_BACKEND as for etkv_cache_freeze(). After an error nothing has
 * changed.
 */
ETKV_API etkv_status etkv_cache_attach(
    etkv_cache* cache,
    const etkv_prefix* prefix,
    int32_t length,
    etkv_error** error);

/** Returns the number of positions, or -1 if `prefix` is no live handle. */
ETKV_API int32_t etkv_prefix_length(const etkv_prefix* prefix);

/**
 * Returns the smallest length that a cache can attach at, apart from
 * checkpoints. It is more than 1 if layers with windows have dropped rows that
 * queries at smaller lengths would see. -1 if `prefix` is no live handle.
 */
ETKV_API int32_t etkv_prefix_rewindable_to(const etkv_prefix* prefix);

/**
 * Returns the bytes of the rows of this prefix. Rows of an earlier prefix that
 * the frozen cache was attached to are not counted. 0 if `prefix` is no live
 * handle.
 */
ETKV_API uint64_t etkv_prefix_bytes(const etkv_prefix* prefix);

/** Frees a handle. Caches that read the rows keep them. */
ETKV_API void etkv_prefix_free(etkv_prefix* prefix);

/* ---- Beginnings of texts that outlive the process ---------------------- */

/**
 * A folder or a bucket of texts that caches have read, for any number of
 * threads and processes. A file appears under its name only when it is
 * complete.
 *
 * The files hold keys, values and token ids: they reveal what users wrote. Only
 * etkv_prefix_store_save(), and a prefix cache that has the store, write them.
 */
typedef struct etkv_prefix_store etkv_prefix_store;

/**
 * Opens a folder. If the folder does not exist, it is made, and only the user
 * may access it. The caller frees the store with etkv_prefix_store_free().
 *
 * @param folder     the folder. In a library that was built with ETKV_BUCKETS
 *                   also the address of a bucket: s3://bucket/prefix, gs:// or
 *                   az://. Credentials and endpoint come from the environment,
 *                   such as AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
 *                   AWS_REGION and AWS_ENDPOINT. "The folder" then means the
 *                   bucket's objects whose names begin with the prefix and a
 *                   slash.
 * @param max_bytes  the maximum bytes of the store's files. To keep within it,
 *                   etkv_prefix_store_save() removes the least recently used
 *                   files. A file that is being written does not count yet.
 *
 * ETKV_ERROR_FILE if the folder cannot be made or read.
 * ETKV_ERROR_UNSUPPORTED for an address in a library without buckets.
 */
ETKV_API etkv_status etkv_prefix_store_open(
    const char* folder,
    uint64_t max_bytes,
    etkv_prefix_store** store,
    etkv_error** error);

/** Frees a store. The folder stays. */
ETKV_API void etkv_prefix_store_free(etkv_prefix_store* store);

/**
 * Stores the number of files in the folder, and their bytes.
 *
 * ETKV_ERROR_FILE if the folder cannot be read.
 */
ETKV_API etkv_status etkv_prefix_store_usage(
    const etkv_prefix_store* store,
    size_t* n_files,
    uint64_t* n_bytes,
    etkv_error** error);

/**
 * Stores the contents of a cache of one sequence. No file is written for a text
 * of fewer than 32 tokens, for a text that is the beginning of one in the
 * folder, for a text whose file would exceed `max_bytes` alone, or for a cache
 * that etkv_cache_convert() changed. An older file whose text is a beginning of
 * this one is removed if the new file serves every text that the older one
 * serves.
 *
 * @param options  the model's fingerprint, and the text of the cache, token by
 *                 token.
 * @param written  receives whether a file was written. NULL if it is not
 *                 wanted.
 *
 * ETKV_ERROR_INVALID_ARGUMENT without a fingerprint, if the cache holds
 * candidates or a sequence other than 0, or if its positions do not match the
 * tokens; and the errors of etkv_cache_save().
 */
ETKV_API etkv_status etkv_prefix_store_save(
    const etkv_prefix_store* store,
    const etkv_cache* cache,
    const etkv_save_options* options,
    bool* written,
    etkv_error** error);

/**
 * Loads the longest beginning of a text that the folder has for a cache of this
 * kind, with these layers and formats. The caller must run at least one token
 * to get logits, so it passes the text without its last token.
 *
 * A layer with a window can be rewound only a little. So a file of such a model
 * serves only texts that begin with all or nearly all of the file's tokens. A
 * damaged file is skipped, with a warning in the log.
 *
 * @param cache     an empty cache.
 * @param options   the model's fingerprint, and the text.
 * @param n_loaded  receives the number of tokens that the cache then holds: 0,
 *                  or at least 32.
 *
 * ETKV_ERROR_INVALID_ARGUMENT without a fingerprint, and if the cache is not
 * empty. ETKV_ERROR_FILE if the folder cannot be read. ETKV_ERROR_STEP while a
 * step is open. ETKV_ERROR_UNSUPPORTED for a kind that Rust code added.
 * ETKV_ERROR_BACKEND if the cache is poisoned or memory runs out.
 */
ETKV_API etkv_status etkv_prefix_store_load(
    const etkv_prefix_store* store,
    etkv_cache* cache,
    const etkv_save_options* options,
    size_t* n_loaded,
    etkv_error** error);

/**
 * Stores how many tokens etkv_prefix_store_load() would load into an empty
 * cache like `cache`, which may itself hold positions. Files are not read in
 * full, so damage shows only when they are loaded.
 */
ETKV_API etkv_status etkv_prefix_store_find(
    const etkv_prefix_store* store,
    const etkv_cache* cache,
    const etkv_save_options* options,
    size_t* n_stored,
    etkv_error** error);

/* ---- Prefixes in memory, by their texts -------------------------------- */

/**
 * Prefixes in memory, looked up by the model's fingerprint, the layers and
 * formats of the cache, and the token ids of the text. Any number of threads
 * may use one prefix cache.
 */
typedef struct etkv_prefix_cache etkv_prefix_cache;

/** A pin: it keeps a prefix in memory until the pin is freed. */
typedef struct etkv_prefix_pin etkv_prefix_pin;

/** The limits and the store of a prefix cache. */
typedef struct etkv_prefix_cache_options {
  size_t struct_size;
  /**
   * The maximum bytes of rows that prefixes keep in memory; 0 for no limit. The
   * least recently used prefixes are dropped first; pinned ones stay.
   */
  uint64_t max_bytes;
  /**
   * A store that is read if memory has no beginning of a text. Every kept text
   * is written to it. NULL for none. The handle of the store may be freed
   * afterwards.
   */
  const etkv_prefix_store* store;
} etkv_prefix_cache_options;

/** The contents of a prefix cache, and counts of its use. */
typedef struct etkv_prefix_statistics {
  size_t struct_size;
  /** The number of prefixes in memory. */
  size_t n_prefixes;
  /** The number of these prefixes that are pinned. */
  size_t n_pinned;
  /**
   * Bytes of the rows of prefixes in memory. Rows that several prefixes share
   * count once.
   */
  uint64_t n_bytes;
  /** Tokens of the texts passed to etkv_prefix_cache_attach(). */
  uint64_t tokens_asked;
  /** The tokens of these texts that were found in memory. */
  uint64_t tokens_in_memory;
  /** The tokens of these texts that were found in the store. */
  uint64_t tokens_in_store;
  /**
   * The number of texts that wait to be read ahead, including the one that is
   * being read now.
   */
  size_t n_ahead_waiting;
  /** The number of texts that were read ahead, wholly or in part. */
  uint64_t n_ahead_read;
  /** The tokens that were read ahead. */
  uint64_t tokens_ahead;
  /** The number of texts that could not be read ahead; the log has reasons. */
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
 * keep their prefixes. Waits for a text that is being read ahead.
 */
ETKV_API void etkv_prefix_cache_free(etkv_prefix_cache* prefixes);

/**
 * Attaches an empty cache to the longest kept beginning of a text. The caller
 * must run at least one token to get logits, so it passes the text without its
 * last token.
 *
 * Layers with windows can be rewound only a little. So a prefix of such a model
 * serves only texts that begin with all or nearly all of the prefix's tokens.
 * If the store has a longer beginning, the cache loads that one. Later caches
 * then share it in memory. If the store fails, it is skipped, with a warning in
 * the log.
 *
 * @param options     the model's fingerprint, and the text.
 * @param n_attached  receives the number of tokens that the cache then holds.
 *
 * ETKV_ERROR_INVALID_ARGUMENT without a fingerprint, and if the cache is not
 * empty. ETKV_ERROR_STEP while a step is open. ETKV_ERROR_UNSUPPORTED for a
 * kind that Rust code added. ETKV_ERROR_BACKEND if the cache is poisoned or
 * memory runs out.
 */
ETKV_API etkv_status etkv_prefix_cache_attach(
    const etkv_prefix_cache* prefixes,
    etkv_cache* cache,
    const etkv_save_options* options,
    size_t* n_attached,
    etkv_error** error);

/**
 * Stores how many tokens etkv_prefix_cache_attach() would find for an empty
 * cache like `cache`, which may itself hold positions.
 */
ETKV_API etkv_status etkv_prefix_cache_find(
    const etkv_prefix_cache* prefixes,
    const etkv_cache* cache,
    const etkv_save_options* options,
    size_t* n_kept,
    etkv_error** error);

/**
 * Keeps the contents of a cache. The cache continues from the kept contents. An
 * older prefix whose text is a beginning of this one is removed if the new one
 * serves every text that the older one serves. The store receives the text too:
 * its file reveals what users wrote.
 *
 * @param options  the model's fingerprint, and the text of the cache, token by
 *                 token.
 * @param kept     receives whether memory now has the text. False if the rows
 *                 exceed `max_bytes`, or if etkv_cache_convert() changed the
 *                 cache. NULL if it is not wanted.
 *
 * ETKV_ERROR_INVALID_ARGUMENT without a fingerprint or tokens, and if the cache
 * does not hold the positions of all tokens; and the errors of
 * etkv_cache_freeze().
 */
ETKV_API etkv_status etkv_prefix_cache_keep(
    const etkv_prefix_cache* prefixes,
    etkv_cache* cache,
    const etkv_save_options* options,
    bool* kept,
    etkv_error** error);

/**
 * Reads the longest beginning of a text in the store into memory, on a thread
 * of the prefix cache, so that a later etkv_prefix_cache_attach() of a cache
 * like this one finds it in memory. This call itself waits for nothing, and
 * accesses neither the folder nor the network.
 *
 * The result is a prefix like others: it counts against `max_bytes` and the
 * memory budget. A text that cannot be read, perhaps for lack of memory, is
 * counted in etkv_prefix_statistics. For a minute after the read,
 * etkv_prefix_cache_attach() does not query the store for this text again, as
 * long as memory has it. The memory budget's callback may run on the thread of
 * the prefix cache.
 *
 * @param cache    a cache of the same kind, layers and formats as those that
 *                 will read the text. It may hold positions, and does not
 *                 change.
 * @param options  the model's fingerprint, and the text.
 * @param waits    receives whether the text waits to be read: false if memory
 *                 has the whole text, if there is no store, or if 16 other
 *                 texts wait. NULL if it is not wanted.
 *
 * ETKV_ERROR_INVALID_ARGUMENT without a fingerprint. ETKV_ERROR_UNSUPPORTED for
 * a kind that Rust code added. ETKV_ERROR_BACKEND if no thread can be started.
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
 * ETKV_ERROR_INVALID_ARGUMENT without a fingerprint, and if no prefix has the
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
 * Frees prefixes that are not pinned and that no cache reads, least recently
 * used first, until `n_bytes` are free.
 *
 * @param freed  receives the bytes that were freed. NULL if it is not wanted.
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

#endif /* ETKV_PREFIX_H */
