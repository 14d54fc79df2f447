/*
 * The contents of a cache in a file, and back. docs/saving.md describes the
 * file. A part of etkv.h, whose conventions apply here.
 *
 * A file holds keys, values and token ids: it reveals what users wrote. etkv
 * writes one only when a call requests it.
 */
#ifndef ETKV_SAVING_H
#define ETKV_SAVING_H

#include <stddef.h>
#include <stdint.h>

#include "etkv/cache.h"
#include "etkv/error.h"
#include "etkv/export.h"
#include "etkv/seq.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Labels that the caller adds to the contents of a cache. */
typedef struct etkv_save_options {
  size_t struct_size;
  /**
   * Identifies the model, such as etkv_fingerprint() of the program. NULL is
   * the same as "".
   */
  const char* fingerprint;
  /** `n_tokens` token ids. etkv does not interpret them. */
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
 * ETKV_ERROR_FILE if the file cannot be written; a file that already exists
 * stays as it was. ETKV_ERROR_STEP while a step is open. ETKV_ERROR_UNSUPPORTED
 * for a kind that Rust code added. ETKV_ERROR_BACKEND if the cache is
 * poisoned.
 */
ETKV_API etkv_status etkv_cache_save(
    const etkv_cache* cache,
    const char* path,
    const etkv_save_options* options,
    etkv_error** error);

/**
 * Replaces the contents of a cache with those of a file. Everything is checked
 * before the cache changes. Old and new contents are in memory until the new
 * ones are complete.
 *
 * A file fits a cache of the same kind, layers and windows, with enough
 * capacity for its positions. If the formats of the config are the same too,
 * the cache continues exactly as the saved cache would have. Otherwise rows in
 * f32, f16 and bf16 are converted into the formats of this cache, and rows in
 * other formats are refused.
 *
 * @param path         the file.
 * @param fingerprint  the fingerprint that was passed to etkv_cache_save().
 *                     NULL is the same as "".
 * @param tokens       receives the token ids of the file, which the caller
 *                     frees with etkv_tokens_free(). NULL if they are not
 *                     wanted.
 * @param n_tokens     receives their number. NULL where `tokens` is.
 *
 * ETKV_ERROR_FILE for a file that cannot be read, is damaged, or is of another
 * version, model or config. ETKV_ERROR_STEP while a step is open.
 * ETKV_ERROR_UNSUPPORTED for a kind that Rust code added. ETKV_ERROR_BACKEND if
 * the cache is poisoned or memory runs out.
 */
ETKV_API etkv_status etkv_cache_load(
    etkv_cache* cache,
    const char* path,
    const char* fingerprint,
    int64_t** tokens,
    size_t* n_tokens,
    etkv_error** error);

/**
 * Writes one sequence to a file, as etkv_cache_save() does. The file is the
 * same as that of a cache that holds only this sequence, as sequence 0. So
 * etkv_cache_load() can read the file too.
 *
 * @param sequence  from 0 to 255; a sequence that holds positions and carries
 *                  no candidates.
 * @param path      the file, which may exist.
 * @param options   NULL adds nothing.
 *
 * The errors of etkv_cache_save(), and ETKV_ERROR_INVALID_ARGUMENT for any
 * other `sequence`.
 */
ETKV_API etkv_status etkv_seq_cache_save(
    const etkv_seq_cache* cache,
    int32_t sequence,
    const char* path,
    const etkv_save_options* options,
    etkv_error** error);

/**
 * Adds the only sequence of a file to the cache. Everything is checked before
 * the cache changes, and other sequences stay as they are. Until the load is
 * complete, the rows of the sequence are in memory twice.
 *
 * A file of a cache of any kind fits, if it holds one sequence without
 * candidates, and the layers and windows are the same. Rows are converted to
 * the present formats of this cache: f32, f16 and bf16 are converted into each
 * other. Other conversions are refused.
 *
 * @param sequence     from 0 to 255; an empty sequence.
 * @param path         the file.
 * @param fingerprint  the fingerprint in the file. NULL is the same as "".
 * @param tokens       receives the token ids of the file, which the caller
 *                     frees with etkv_tokens_free(). NULL if they are not
 *                     wanted.
 * @param n_tokens     receives their number. NULL where `tokens` is.
 *
 * ETKV_ERROR_INVALID_ARGUMENT for a sequence that holds positions or carries
 * candidates. ETKV_ERROR_CAPACITY if the loaded sequence does not fit next to
 * the other sequences. ETKV_ERROR_FILE for a file that cannot be read, is
 * damaged, or is of another version, model or config, and for values that are
 * not finite, because steps of other sequences would read them too.
 * ETKV_ERROR_STEP while a step is open. ETKV_ERROR_UNSUPPORTED for a kind that
 * Rust code added. ETKV_ERROR_BACKEND if the cache is poisoned or memory runs
 * out. After an error the contents are as before.
 */
ETKV_API etkv_status etkv_seq_cache_load(
    etkv_seq_cache* cache,
    int32_t sequence,
    const char* path,
    const char* fingerprint,
    int64_t** tokens,
    size_t* n_tokens,
    etkv_error** error);

/**
 * Stores the fingerprint of a file, such as a program: "xxh3-" and 32
 * hexadecimal digits. Files with the same bytes have the same fingerprint.
 * Reads the whole file.
 *
 * @param fingerprint  receives a string, which the caller frees with
 *                     etkv_string_free().
 *
 * ETKV_ERROR_FILE if the file cannot be read.
 */
ETKV_API etkv_status
etkv_fingerprint(const char* path, char** fingerprint, etkv_error** error);

/**
 * Frees the token ids that etkv_cache_load() or etkv_seq_cache_load() stored.
 * `n_tokens` is the number that the same call stored. Free each list once. Like
 * a string, a list is memory, not a handle. Does nothing for NULL.
 */
ETKV_API void etkv_tokens_free(int64_t* tokens, size_t n_tokens);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_SAVING_H */
