/*
 * Caches for hosts that compute with MLX themselves.
 * A part of etkv.h, whose conventions hold here.
 */
#ifndef ETKV_FORWARDS_H
#define ETKV_FORWARDS_H

#include <stddef.h>
#include <stdint.h>

#include "etkv/cache.h"
#include "etkv/error.h"
#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * The forwards of a host that computes with MLX itself, on a cache. `mlx_cache.hpp`
 * is this for C++.
 *
 * Arrays are pointers to `mlx::core::array`, and a stream is one to
 * `mlx::core::Stream`, of the very MLX that the library is linked to
 * (etkv_mlx_version()). What is passed in is shared, not copied; results are
 * assigned to arrays that the caller has made, of any shape.
 *
 * A forward begins with the call of the first layer, and has been when every layer
 * of the cache was called, once, with the same positions; in any order. A layer
 * that comes again, or with other positions, begins a new one: what was not
 * finished has not been. Where layers of a model share keys and values, the host
 * calls the layer once, and attends to what it gave as often as it likes. It
 * evaluates what it was given when it likes. Where that fails after the last
 * layer was called, the forward's positions are there with rows that nobody
 * knows: rewind them, or clear the cache.
 *
 * A call that is refused, or fails, ends the forward as well: it has not been.
 *
 * MLX works for one thread at a time. These calls wait for each other and for
 * programs; the host keeps its own work in MLX off other threads meanwhile. While a
 * forward is under way, what would change the cache is refused with
 * ETKV_ERROR_STEP rather than kept waiting.
 */
typedef struct etkv_forwards etkv_forwards;

/** Makes a handle; nothing else makes steps on the cache while it is in use. */
ETKV_API etkv_status etkv_forwards_new(
    const etkv_cache* cache,
    etkv_forwards** forwards,
    etkv_error** error);

/** Gives back the handle; a forward that is not finished has not been. */
ETKV_API void etkv_forwards_free(etkv_forwards* forwards);

/** The forward that is not finished, if there is one, has not been. */
ETKV_API etkv_status
etkv_forwards_abort(etkv_forwards* forwards, etkv_error** error);

/** What a layer brings. */
typedef struct etkv_mlx_rows {
  size_t struct_size;
  size_t layer;
  /** One a token, consecutive for each sequence. */
  const int32_t* positions;
  size_t n_positions;
  /** `mlx::core::array`, [1, n_kv_heads, n_positions, k_head_dim], a float. */
  const void* k;
  /** Likewise with v_head_dim. */
  const void* v;
  /** `mlx::core::Stream`; NULL for the library's own. */
  const void* stream;
} etkv_mlx_rows;

/** Which keys a query sees. */
typedef int32_t etkv_mask;
enum {
  /** All. */
  ETKV_MASK_NONE = 0,
  /** Query i of T all but the last T - 1 - i. */
  ETKV_MASK_CAUSAL = 1,
  /** Those that are true in an array of booleans. */
  ETKV_MASK_EXPLICIT = 2,
};

/**
 * Writes a layer's rows, and gives what its queries attend to.
 *
 * @param k          [1, n_kv_heads, L, k_head_dim], in the dtype of `rows->k`:
 *                   all of it unpacked where the cache stores it otherwise.
 * @param v          likewise.
 * @param mask_kind  how to mask.
 * @param mask       [n_positions, L], where that is ETKV_MASK_EXPLICIT; as it was
 *                   otherwise.
 */
ETKV_API etkv_status etkv_forwards_update_and_fetch(
    etkv_forwards* forwards,
    const etkv_mlx_rows* rows,
    void* k,
    void* v,
    etkv_mask* mask_kind,
    void* mask,
    etkv_error** error);

/**
 * Writes a layer's rows, and attends to what is there, as it is stored.
 *
 * @param q         `mlx::core::array`, [1, n_heads, n_positions, k_head_dim].
 * @param scale     of the scores.
 * @param attended  [1, n_heads, n_positions, v_head_dim], in the dtype of `q`.
 */
ETKV_API etkv_status etkv_forwards_update_and_attend(
    etkv_forwards* forwards,
    const etkv_mlx_rows* rows,
    const void* q,
    float scale,
    void* attended,
    etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_FORWARDS_H */
