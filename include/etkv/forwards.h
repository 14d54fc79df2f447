/*
 * Caches for hosts that compute with MLX themselves.
 * A part of etkv.h, whose conventions apply here.
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
 * A handle for forwards on a cache, in a host that computes with MLX itself.
 * `mlx_cache.hpp` wraps it for C++.
 *
 * Arrays are pointers to `mlx::core::array`, and a stream is a pointer to
 * `mlx::core::Stream`. Both must be of the MLX that the library is linked to
 * (etkv_mlx_version()). Arrays that are passed in are shared, not copied.
 * Results are assigned to arrays that the caller owns. Before the call, the
 * caller's arrays may have any shape.
 *
 * A forward begins with the call of its first layer. It commits once every
 * layer of the cache has been called exactly once, in any order, with the same
 * positions. A second call of a layer, or a call with other positions, rolls
 * back the unfinished forward and begins a new one. A call that is refused or
 * fails rolls back the forward too.
 *
 * If several layers of a model share keys and values, the host calls one layer
 * of the cache for all of them, and attends to its result as often as needed.
 * The host evaluates the results when it likes. If evaluation fails after the
 * forward committed, the rows of its positions are unknown: rewind them, or
 * clear the cache.
 *
 * MLX works for one thread at a time. Calls on this handle wait for each other
 * and for programs. During such a call the host must not use MLX on other
 * threads. While a forward is open, calls that change the cache return
 * ETKV_ERROR_STEP instead of waiting.
 */
typedef struct etkv_forwards etkv_forwards;

/**
 * Makes a handle. The caller frees the handle with etkv_forwards_free(). The
 * handle shares the cache. While the handle is in use, the host must not run
 * other steps on the cache.
 */
ETKV_API etkv_status etkv_forwards_new(
    const etkv_cache* cache,
    etkv_forwards** forwards,
    etkv_error** error);

/** Frees the handle, and rolls back an unfinished forward. */
ETKV_API void etkv_forwards_free(etkv_forwards* forwards);

/** Rolls back an unfinished forward. Does nothing without one. */
ETKV_API etkv_status
etkv_forwards_abort(etkv_forwards* forwards, etkv_error** error);

/** The rows that a layer writes. The caller owns what the struct points to. */
typedef struct etkv_mlx_rows {
  size_t struct_size;
  size_t layer;
  /** One position per token. The positions of each sequence are consecutive. */
  const int32_t* positions;
  size_t n_positions;
  /**
   * The keys: `mlx::core::array`, [1, n_kv_heads, n_positions, k_head_dim], of
   * dtype float32, float16 or bfloat16.
   */
  const void* k;
  /** The values: the same with v_head_dim. */
  const void* v;
  /** `mlx::core::Stream` to put the work on; NULL for the library's own. */
  const void* stream;
} etkv_mlx_rows;

/** The keys that a query sees. */
typedef int32_t etkv_mask;
enum {
  /** All of them. */
  ETKV_MASK_NONE = 0,
  /** For query i of T, all but the last T - 1 - i. */
  ETKV_MASK_CAUSAL = 1,
  /** Those that are true in an array of booleans. */
  ETKV_MASK_EXPLICIT = 2,
};

/**
 * Writes a layer's rows, and stores what its queries attend to. The caller owns
 * the four results.
 *
 * @param k          receives the keys: [1, n_kv_heads, L, k_head_dim], in the
 *                   dtype of `rows->k`. If rows are stored in another format,
 *                   all L rows are converted to this dtype.
 * @param v          receives the values: likewise, with v_head_dim.
 * @param mask_kind  receives the kind of the mask.
 * @param mask       receives [n_positions, L] booleans if the kind is
 *                   ETKV_MASK_EXPLICIT; unchanged otherwise.
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
 * Writes a layer's rows, and attends to the rows that the layer's queries see,
 * in the format that they are stored in.
 *
 * @param q         the queries: `mlx::core::array`, [1, n_heads, n_positions,
 *                  k_head_dim], of a float dtype. n_heads is a multiple of
 *                  n_kv_heads.
 * @param scale     the factor of the scores; finite.
 * @param attended  receives [1, n_heads, n_positions, v_head_dim], in the dtype
 *                  of `q`.
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
