/*
 * Several sequences in one cache.
 * A part of etkv.h, whose conventions hold here.
 */
#ifndef ETKV_SEQ_H
#define ETKV_SEQ_H

#include <stddef.h>
#include <stdint.h>

#include "etkv/cache.h"
#include "etkv/error.h"
#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * The face of a cache that many sequences share. Sequences have numbers from 0
 * to 255 and need not be made: one that holds nothing is empty.
 *
 * Ranges of positions are from `begin` up to, and without, `end`; INT32_MAX as
 * the end means all that follow. Every change is refused with ETKV_ERROR_STEP
 * while a step is open, and with ETKV_ERROR_INVALID_ARGUMENT for a number or
 * range that cannot be.
 */
typedef struct etkv_seq_cache etkv_seq_cache;

/**
 * Makes a handle for sequences on the same cache; ETKV_ERROR_KIND, naming its
 * kind, where it has one sequence only. The other handle stays.
 */
ETKV_API etkv_status etkv_cache_as_seq(
    const etkv_cache* cache,
    etkv_seq_cache** sequences,
    etkv_error** error);

/** Gives back the handle; the cache lives on while others hold it. */
ETKV_API void etkv_seq_cache_free(etkv_seq_cache* cache);

/**
 * Says which sequence each of the `n_tokens` tokens of the next step belongs to.
 * Without it, the tokens are those of the frontiers that were proposed, by the
 * number of their sequence; and without those, of the only sequence there is.
 * What is said holds until a step has worked, or something else is said. No
 * tokens are ETKV_ERROR_INVALID_ARGUMENT.
 */
ETKV_API etkv_status etkv_seq_cache_begin_step(
    etkv_seq_cache* cache,
    const int32_t* sequences,
    size_t n_tokens,
    etkv_error** error);

/**
 * The same for tokens that belong to several sequences each, which share their
 * cells: the first counts[0] of the `n_sequences` numbers are the first token's,
 * the next counts[1] the second's. Every count is at least 1.
 */
ETKV_API etkv_status etkv_seq_cache_begin_step_shared(
    etkv_seq_cache* cache,
    const int32_t* sequences,
    size_t n_sequences,
    const int32_t* counts,
    size_t n_tokens,
    etkv_error** error);

/**
 * Withdraws what etkv_seq_cache_begin_step() or
 * etkv_seq_cache_begin_step_shared() said, for a step that does not come. Does
 * nothing where nothing was said. ETKV_ERROR_STEP in the middle of a step.
 */
ETKV_API etkv_status
etkv_seq_cache_cancel_step(etkv_seq_cache* cache, etkv_error** error);

/**
 * Lets `target` have the positions of `source` in a range as well, in the same
 * cells: no bytes move.
 *
 * ETKV_ERROR_POSITION where `target` has other cells for some of them, or where
 * layers with windows have dropped what its next query would see.
 */
ETKV_API etkv_status etkv_seq_cache_cp(
    etkv_seq_cache* cache,
    int32_t source,
    int32_t target,
    int32_t begin,
    int32_t end,
    etkv_error** error);

/**
 * Takes the positions in a range from a sequence. A cell that no sequence has is
 * free; a sequence of which nothing is left begins at 0 again. All of them take
 * its tree away as well; a part of a sequence that carries a tree is
 * ETKV_ERROR_STEP.
 *
 * ETKV_ERROR_POSITION where the sequence would go on below what
 * etkv_seq_cache_rewindable_to() says.
 */
ETKV_API etkv_status etkv_seq_cache_rm(
    etkv_seq_cache* cache,
    int32_t sequence,
    int32_t begin,
    int32_t end,
    etkv_error** error);

/** Removes every sequence but one. */
ETKV_API etkv_status etkv_seq_cache_keep(
    etkv_seq_cache* cache,
    int32_t sequence,
    etkv_error** error);

/** Stores how many positions a sequence holds. */
ETKV_API etkv_status etkv_seq_cache_len(
    const etkv_seq_cache* cache,
    int32_t sequence,
    int32_t* length,
    etkv_error** error);

/**
 * Stores the position of a sequence's next token: one past its last. After a
 * removal at the front that is more than it holds.
 */
ETKV_API etkv_status etkv_seq_cache_next(
    const etkv_seq_cache* cache,
    int32_t sequence,
    int32_t* position,
    etkv_error** error);

/** As etkv_cache_rewindable_to(), for one of several sequences. */
ETKV_API etkv_status etkv_seq_cache_rewindable_to(
    const etkv_seq_cache* cache,
    int32_t sequence,
    int32_t* length,
    etkv_error** error);

/** Positions from `begin` up to, and without, `end`. */
typedef struct etkv_range {
  int32_t begin;
  int32_t end;
} etkv_range;

/**
 * Stores the positions that a sequence holds, as ranges in order, and in `n` how
 * many ranges there are. `ranges` has room for `room`, which is to be enough;
 * NULL and 0 ask for `n` alone.
 */
ETKV_API etkv_status etkv_seq_cache_positions(
    const etkv_seq_cache* cache,
    int32_t sequence,
    etkv_range* ranges,
    size_t room,
    size_t* n,
    etkv_error** error);

/**
 * Stores the numbers of the sequences that hold positions or carry trees, in
 * order, and in `n` how many there are; 256 at most. As above.
 */
ETKV_API etkv_status etkv_seq_cache_sequences(
    const etkv_seq_cache* cache,
    int32_t* sequences,
    size_t room,
    size_t* n,
    etkv_error** error);

/**
 * Makes each sequence one run of cells as far as what they share lets it, so
 * that it is read without a mask again. Moves only what has to.
 *
 * After ETKV_ERROR_BACKEND, where rows were moved already, the cache is poisoned until
 * it is cleared.
 */
ETKV_API etkv_status
etkv_seq_cache_compact(etkv_seq_cache* cache, etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_SEQ_H */
