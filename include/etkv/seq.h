/*
 * Several sequences in one cache, and trees of candidates after them.
 * A part of etkv.h, whose conventions apply here.
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

/* ---- Sequences --------------------------------------------------------- */

/**
 * A handle to a cache that many sequences share. Sequences have numbers from 0
 * to 255. They need no creation: a sequence without positions is empty.
 *
 * Ranges of positions include `begin` and exclude `end`; INT32_MAX as the end
 * means all positions that follow. Calls that change the cache return
 * ETKV_ERROR_STEP while a step is open. Every call returns
 * ETKV_ERROR_INVALID_ARGUMENT for a sequence number outside 0 to 255, and for a
 * range that starts below 0 or ends before it starts.
 */
typedef struct etkv_seq_cache etkv_seq_cache;

/**
 * Stores a new handle to the same cache, as a cache of several sequences. The
 * caller frees the new handle with etkv_seq_cache_free(). The handle `cache`
 * stays valid. ETKV_ERROR_KIND if the cache can hold only one sequence; the
 * message names its kind.
 */
ETKV_API etkv_status etkv_cache_as_seq(
    const etkv_cache* cache,
    etkv_seq_cache** sequences,
    etkv_error** error);

/** Frees the handle. The cache lives on while it has other owners. */
ETKV_API void etkv_seq_cache_free(etkv_seq_cache* cache);

/**
 * Declares the sequence of each of the `n_tokens` tokens of the next step.
 * Without a declaration, the tokens belong to the proposed frontiers, in order
 * of sequence number; without frontiers, they belong to the only sequence.
 *
 * The declaration holds until a step commits or another declaration replaces
 * it. The numbers are copied. ETKV_ERROR_INVALID_ARGUMENT if `n_tokens` is 0;
 * an earlier declaration then stays.
 */
ETKV_API etkv_status etkv_seq_cache_begin_step(
    etkv_seq_cache* cache,
    const int32_t* sequences,
    size_t n_tokens,
    etkv_error** error);

/**
 * Declares the sequences of each token of the next step, as
 * etkv_seq_cache_begin_step() does. A token may belong to several sequences,
 * which then share its cell.
 *
 * @param sequences    `n_sequences` numbers: first those of the first token,
 *                     then those of the second, and so on.
 * @param counts       how many of these belong to each of the `n_tokens`
 *                     tokens; each is at least 1, and their sum is
 *                     `n_sequences`.
 *
 * ETKV_ERROR_INVALID_ARGUMENT also if a token names a sequence twice.
 */
ETKV_API etkv_status etkv_seq_cache_begin_step_shared(
    etkv_seq_cache* cache,
    const int32_t* sequences,
    size_t n_sequences,
    const int32_t* counts,
    size_t n_tokens,
    etkv_error** error);

/**
 * Withdraws the declaration of etkv_seq_cache_begin_step() or
 * etkv_seq_cache_begin_step_shared(), for a step that will not run. Does
 * nothing without a declaration. ETKV_ERROR_STEP while a step is open.
 */
ETKV_API etkv_status
etkv_seq_cache_cancel_step(etkv_seq_cache* cache, etkv_error** error);

/**
 * Makes `target` share the positions of `source` in a range, in the same cells.
 * No bytes move.
 *
 * ETKV_ERROR_POSITION if `target` has other cells at some of these positions,
 * or if layers with windows have dropped rows that the next query of `target`
 * would see. ETKV_ERROR_STEP if `target` carries a tree.
 */
ETKV_API etkv_status etkv_seq_cache_cp(
    etkv_seq_cache* cache,
    int32_t source,
    int32_t target,
    int32_t begin,
    int32_t end,
    etkv_error** error);

/**
 * Removes the positions in a range from a sequence. A cell that no sequence
 * owns is free. A sequence without positions begins at 0 again. Removing all of
 * its positions removes its tree as well.
 *
 * ETKV_ERROR_STEP if the sequence carries a tree and some of its positions
 * would stay. ETKV_ERROR_POSITION if the sequence would continue below
 * etkv_seq_cache_rewindable_to().
 */
ETKV_API etkv_status etkv_seq_cache_rm(
    etkv_seq_cache* cache,
    int32_t sequence,
    int32_t begin,
    int32_t end,
    etkv_error** error);

/** Removes every sequence except `sequence`. */
ETKV_API etkv_status etkv_seq_cache_keep(
    etkv_seq_cache* cache,
    int32_t sequence,
    etkv_error** error);

/** Stores the number of positions that a sequence holds. */
ETKV_API etkv_status etkv_seq_cache_len(
    const etkv_seq_cache* cache,
    int32_t sequence,
    int32_t* length,
    etkv_error** error);

/**
 * Stores the position of a sequence's next token: one past its last. If earlier
 * positions were removed, it is more than the number of positions that the
 * sequence holds.
 */
ETKV_API etkv_status etkv_seq_cache_next(
    const etkv_seq_cache* cache,
    int32_t sequence,
    int32_t* position,
    etkv_error** error);

/**
 * Stores what etkv_cache_rewindable_to() stores, for one of several sequences.
 */
ETKV_API etkv_status etkv_seq_cache_rewindable_to(
    const etkv_seq_cache* cache,
    int32_t sequence,
    int32_t* length,
    etkv_error** error);

/** Stores what etkv_cache_reachable() stores, for one of several sequences. */
ETKV_API etkv_status etkv_seq_cache_reachable(
    const etkv_seq_cache* cache,
    int32_t sequence,
    int32_t position,
    int32_t* reachable,
    etkv_error** error);

/**
 * Does what etkv_cache_mark_turn() does, for one of several sequences.
 */
ETKV_API etkv_status etkv_seq_cache_mark_turn(
    etkv_seq_cache* cache,
    int32_t sequence,
    int32_t end,
    etkv_error** error);

/**
 * Makes a checkpoint of one of several sequences, as etkv_cache_mark() does.
 */
ETKV_API etkv_status etkv_seq_cache_mark(
    etkv_seq_cache* cache,
    int32_t sequence,
    int32_t position,
    int32_t* marked,
    etkv_error** error);

/** A range of positions: includes `begin`, excludes `end`. */
typedef struct etkv_range {
  int32_t begin;
  int32_t end;
} etkv_range;

/**
 * Stores the positions that a sequence holds, as ranges in order.
 *
 * @param ranges  the caller's array, with room for `room` ranges; NULL, with a
 *                `room` of 0, to store `n` only.
 * @param n       receives the number of ranges.
 *
 * ETKV_ERROR_INVALID_ARGUMENT if `room` is less than the number of ranges.
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
 * order.
 *
 * @param sequences  the caller's array, with room for `room` numbers; NULL,
 *                   with a `room` of 0, to store `n` only.
 * @param n          receives the number of sequences, at most 256.
 *
 * ETKV_ERROR_INVALID_ARGUMENT if `room` is less than their number.
 */
ETKV_API etkv_status etkv_seq_cache_sequences(
    const etkv_seq_cache* cache,
    int32_t* sequences,
    size_t room,
    size_t* n,
    etkv_error** error);

/**
 * Moves each sequence into one run of cells, as far as shared cells allow, so
 * that steps read it without a mask again. Moves as few rows as possible.
 *
 * If ETKV_ERROR_BACKEND occurs after rows have moved, the cache is poisoned
 * until it is cleared.
 */
ETKV_API etkv_status
etkv_seq_cache_compact(etkv_seq_cache* cache, etkv_error** error);

/* ---- Trees of candidates ----------------------------------------------- */

/** A handle to a cache whose sequences carry trees of candidates. */
typedef struct etkv_tree_cache etkv_tree_cache;

/**
 * Stores a new handle to the same cache, as a cache with trees. The caller
 * frees the new handle with etkv_tree_cache_free(). The handle `cache` stays
 * valid. ETKV_ERROR_KIND if the cache cannot carry trees; the message names its
 * kind.
 */
ETKV_API etkv_status etkv_cache_as_tree(
    const etkv_cache* cache,
    etkv_tree_cache** trees,
    etkv_error** error);

/** Frees the handle. The cache lives on while it has other owners. */
ETKV_API void etkv_tree_cache_free(etkv_tree_cache* cache);

/**
 * Appends a frontier of candidates to the tree after a sequence. These nodes
 * are the queries of the sequence's next step. Each query sees the sequence,
 * its ancestors and itself. A node's position is the sequence's next position
 * plus its depth.
 *
 * @param sequence  the number of the sequence, 0 to 255.
 * @param parents   the parent of each of the `n_nodes` new nodes: the number of
 *                  an earlier node of the tree, over all its frontiers, or -1
 *                  for the sequence itself. Copied.
 *
 * ETKV_ERROR_INVALID_ARGUMENT if `n_nodes` is 0 or if a parent is not an
 * earlier node, ETKV_ERROR_STEP if the last frontier has not run or a step is
 * open, and ETKV_ERROR_CAPACITY if the frontier does not fit.
 */
ETKV_API etkv_status etkv_tree_cache_propose(
    etkv_tree_cache* cache,
    int32_t sequence,
    const int32_t* parents,
    size_t n_nodes,
    etkv_error** error);

/**
 * Adds a chain of candidates to the sequence, and removes the rest of its tree.
 *
 * @param accepted  the numbers of `n_nodes` nodes that ran: a child of the
 *                  sequence, a child of that node, and so on. NULL and 0 remove
 *                  the whole tree.
 *
 * ETKV_ERROR_INVALID_ARGUMENT if there is no tree, or if the nodes are not such
 * a chain. ETKV_ERROR_STEP while a step is open. If ETKV_ERROR_BACKEND occurs
 * after rows have moved, the cache is poisoned until it is cleared.
 */
ETKV_API etkv_status etkv_tree_cache_commit(
    etkv_tree_cache* cache,
    int32_t sequence,
    const int32_t* accepted,
    size_t n_nodes,
    etkv_error** error);

/**
 * Stores the number of nodes of the tree after a sequence; 0 without a tree.
 */
ETKV_API etkv_status etkv_tree_cache_len(
    const etkv_tree_cache* cache,
    int32_t sequence,
    size_t* n_nodes,
    etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_SEQ_H */
