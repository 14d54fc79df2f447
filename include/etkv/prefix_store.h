/*
 * Beginnings of texts that outlive the process: a folder or a bucket of files
 * with what caches have read. docs/prefixes.md describes it. A part of etkv.h, whose
 * conventions hold here.
 *
 * The files hold keys, values and token ids: what users wrote can be read from
 * them. They are written where etkv_prefix_store_save() is called, and by a
 * prefix cache that has the store behind it, and nowhere else.
 */
#ifndef ETKV_PREFIX_STORE_H
#define ETKV_PREFIX_STORE_H

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

/**
 * A folder or a bucket of texts that caches have read, for any number of
 * threads and processes. Files appear under their names when they are complete.
 */
typedef struct etkv_prefix_store etkv_prefix_store;

/**
 * Opens a folder, which is made, for the user alone, if it is not there. The
 * caller frees the store with etkv_prefix_store_free().
 *
 * @param folder     the folder. In a library that was built with ETKV_BUCKETS
 *                   also the address of a bucket, such as s3://bucket/prefix,
 *                   of gs:// and of az://. The environment has the credentials
 *                   and the endpoint, as in AWS_ACCESS_KEY_ID,
 *                   AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT. What is
 *                   called the folder here is then the bucket's objects whose
 *                   names begin with the prefix and a slash.
 * @param max_bytes  the most bytes of its files. etkv_prefix_store_save()
 *                   removes those that were used least recently. While a
 *                   file is written it is there besides.
 *
 * ETKV_ERROR_FILE where the folder cannot be made or read.
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
 * ETKV_ERROR_FILE where the folder cannot be read.
 */
ETKV_API etkv_status etkv_prefix_store_usage(
    const etkv_prefix_store* store,
    size_t* n_files,
    uint64_t* n_bytes,
    etkv_error** error);

/**
 * Stores the contents of a cache of one sequence. No file is written for a text
 * of fewer than 32 tokens, one that the folder has already as the beginning of
 * another, and one that takes more bytes than the folder may have; nor for a
 * cache that was converted by hand. Files go whose texts this one begins with,
 * if it serves all that they do.
 *
 * @param options  the model's fingerprint, and the text of the cache, token by
 *                 token.
 * @param written  receives whether a file was written. NULL where it is not
 *                 wanted.
 *
 * ETKV_ERROR_INVALID_ARGUMENT for no fingerprint, and where the cache does not
 * hold the positions of all tokens, of sequence 0 alone and without candidates;
 * and the errors of etkv_cache_save().
 */
ETKV_API etkv_status etkv_prefix_store_save(
    const etkv_prefix_store* store,
    const etkv_cache* cache,
    const etkv_save_options* options,
    bool* written,
    etkv_error** error);

/**
 * Loads the longest beginning of a text that the folder has for a cache of this
 * kind, these layers and these formats. The caller runs the rest, at least one
 * token, whose logits it needs: so it passes the text without its last token.
 *
 * A layer with a window can be rewound a little only. A file of such a model
 * serves texts that go on near its end. A file that is damaged is passed by,
 * with a warning in the log.
 *
 * @param cache     it is empty.
 * @param options   the model's fingerprint, and the text.
 * @param n_loaded  receives how many of the first tokens the cache then holds:
 *                  0, or 32 or more.
 *
 * ETKV_ERROR_INVALID_ARGUMENT for no fingerprint, and where the cache is not
 * empty. ETKV_ERROR_FILE where
 * the folder cannot be read. ETKV_ERROR_STEP while a step is open.
 * ETKV_ERROR_UNSUPPORTED for a kind that the host added. ETKV_ERROR_BACKEND where
 * the cache is poisoned or memory is lacking.
 */
ETKV_API etkv_status etkv_prefix_store_load(
    const etkv_prefix_store* store,
    etkv_cache* cache,
    const etkv_save_options* options,
    size_t* n_loaded,
    etkv_error** error);

/**
 * Stores how many tokens etkv_prefix_store_load() would load for a cache like
 * this one, which may hold something. Files are not read whole, so damage shows
 * only when they are loaded.
 */
ETKV_API etkv_status etkv_prefix_store_find(
    const etkv_prefix_store* store,
    const etkv_cache* cache,
    const etkv_save_options* options,
    size_t* n_stored,
    etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_PREFIX_STORE_H */
