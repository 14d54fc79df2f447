/*
 * The contents of a cache in a file, and back. docs/saving.md describes the
 * file. A part of etkv.h, whose conventions hold here.
 *
 * A file holds keys, values and token ids: what users wrote can be read from
 * it. It is written where a call asks for it, and nowhere else.
 */
#ifndef ETKV_SAVING_H
#define ETKV_SAVING_H

#include <stddef.h>
#include <stdint.h>

#include "etkv/cache.h"
#include "etkv/error.h"
#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What the caller adds to the contents of a cache. */
typedef struct etkv_save_options {
  size_t struct_size;
  /**
   * What the caller tells models apart by, such as etkv_fingerprint() of the
   * program. NULL is the same as "".
   */
  const char* fingerprint;
  /** Token ids, `n_tokens` of them. etkv does not interpret them. */
  const int64_t* tokens;
  size_t n_tokens;
} etkv_save_options;

/**
 * Writes the contents of a cache to a file: rows as they are stored, positions,
 * sequences and trees. The file is written under another name in the same
 * folder, and renamed when it is complete and on the disk; only the user may
 * read it. A declaration of etkv_seq_cache_begin_step() is not saved.
 *
 * @param path     the file, which may exist.
 * @param options  NULL adds nothing.
 *
 * ETKV_ERROR_FILE where the file cannot be written; an older one stays as it
 * was. ETKV_ERROR_STEP while a step is open. ETKV_ERROR_UNSUPPORTED for a kind
 * that the host added. ETKV_ERROR_BACKEND where the cache is poisoned.
 */
ETKV_API etkv_status etkv_cache_save(
    const etkv_cache* cache,
    const char* path,
    const etkv_save_options* options,
    etkv_error** error);

/**
 * Replaces the contents of a cache by those of a file. Everything is checked
 * before the cache changes. Old and new contents are in memory until the new
 * ones are complete.
 *
 * A file fits a cache of the same kind, layers and windows whose capacity its
 * positions do not exceed. Where the formats of the config are the same too,
 * the cache goes on as the saved one would have. Otherwise f32, f16 and bf16
 * are converted into the formats of this cache, and other formats are refused.
 *
 * @param path         the file.
 * @param fingerprint  that of etkv_cache_save(). NULL is the same as "".
 * @param tokens       receives the token ids of the file, which the caller
 *                     frees with etkv_tokens_free(). NULL where they are not
 *                     wanted.
 * @param n_tokens     receives their number. NULL where `tokens` is.
 *
 * ETKV_ERROR_FILE for a file that cannot be read, is damaged, or is of another
 * version, model or config. ETKV_ERROR_STEP while a step is open.
 * ETKV_ERROR_UNSUPPORTED for a kind that the host added. ETKV_ERROR_BACKEND
 * where the cache is poisoned or memory is lacking.
 */
ETKV_API etkv_status etkv_cache_load(
    etkv_cache* cache,
    const char* path,
    const char* fingerprint,
    int64_t** tokens,
    size_t* n_tokens,
    etkv_error** error);

/**
 * Stores the fingerprint of a file, such as a program: "xxh3-" and 32
 * hexadecimal digits, which files of the same bytes have in common. Reads the
 * whole file.
 *
 * @param fingerprint  receives a string, which the caller frees with
 *                     etkv_string_free().
 *
 * ETKV_ERROR_FILE where the file cannot be read.
 */
ETKV_API etkv_status
etkv_fingerprint(const char* path, char** fingerprint, etkv_error** error);

/**
 * Frees the token ids that etkv_cache_load() stored, with the number that it
 * stored. Free each list once. Like a string it is memory, not a handle. Does
 * nothing for NULL.
 */
ETKV_API void etkv_tokens_free(int64_t* tokens, size_t n_tokens);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_SAVING_H */
