/*
 * Bytes of caches' buffers, and their limit.
 * A part of etkv.h, whose conventions apply here.
 */
#ifndef ETKV_MEMORY_H
#define ETKV_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#include "etkv/error.h"
#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Bytes of one attention layer's buffers. */
typedef struct etkv_layer_memory {
  size_t struct_size;
  uint64_t k_allocated;
  uint64_t k_used;
  uint64_t v_allocated;
  uint64_t v_used;
} etkv_layer_memory;

/** Bytes of one recurrent layer's buffers. */
typedef struct etkv_recurrent_layer_memory {
  size_t struct_size;
  /**
   * The bytes of the rows of a convolution or a recurrence, one row for each
   * recent token.
   */
  uint64_t rows_allocated;
  uint64_t rows_used;
  /** The bytes of the states of a recurrence; 0 for a convolution. */
  uint64_t anchors_allocated;
  uint64_t anchors_used;
} etkv_recurrent_layer_memory;

/** Bytes of a cache's buffers. */
typedef struct etkv_memory {
  size_t struct_size;
  /** Bytes of all buffers. */
  uint64_t allocated;
  /** The part of `allocated` that positions use. */
  uint64_t used;
  /** The maximum bytes that the cache can ever hold. */
  uint64_t at_capacity;
  /**
   * The same numbers for each attention layer, or NULL. The caller owns one
   * struct for each such layer of the cache, `layers->struct_size` bytes apart,
   * and sets the `struct_size` of the first. `n_layers` is their number, 0 for
   * NULL.
   */
  etkv_layer_memory* layers;
  size_t n_layers;
  /**
   * The bytes of the rows that the cache reads from a prefix. Other caches may
   * read these rows too. The other fields do not count these bytes.
   */
  uint64_t shared;
  /** Like `layers`, for each recurrent layer; or NULL and 0. */
  etkv_recurrent_layer_memory* recurrent_layers;
  size_t n_recurrent_layers;
} etkv_memory;

/** Bytes of the buffers of all caches in this process, and their limit. */
typedef struct etkv_memory_budget {
  size_t struct_size;
  /** The maximum bytes that the buffers may hold; 0 for no limit. */
  uint64_t limit;
  /**
   * The bytes that the buffers hold now. While a step grows buffers, or a
   * conversion replaces them, both the old and the new buffers are held.
   */
  uint64_t held;
  /**
   * The maximum bytes that the buffers have held or reserved so far. Bytes that
   * a step reserves count even if the step is rolled back before it allocates;
   * refused bytes do not.
   */
  uint64_t peak;
  /** The number of caches, including empty ones. */
  size_t n_caches;
} etkv_memory_budget;

/**
 * Limits the bytes of the buffers of all caches in this process, of every
 * backend. 0 removes the limit; a process begins without one. A call that would
 * exceed the limit fails with `ETKV_ERROR_BACKEND`, whose message names the
 * bytes, and changes nothing. The limit applies to calls that make a cache with
 * upfront allocation, to steps that grow buffers, to conversions and to loads.
 * etkv_seq_cache_compact() can also fail, if rows would move to slots that were
 * never used. etkv_cache_clear() without `release` can fail too, if a cache
 * that allocates upfront was converted.
 *
 * Before it refuses a call, etkv frees prefixes that nothing uses, and then
 * calls the host's callback. A limit below the held bytes is no error: caches
 * keep what they have, and do not grow until enough is free. Programs' weights,
 * memory that MLX keeps for reuse and caches that the application implements do
 * not count.
 */
ETKV_API etkv_status etkv_memory_budget_set(uint64_t limit, etkv_error** error);

/** Fills `budget`. The caller sets its `struct_size` first. */
ETKV_API etkv_status
etkv_memory_budget_read(etkv_memory_budget* budget, etkv_error** error);

/**
 * Frees memory of the host's choice, such as caches that it no longer needs.
 *
 * etkv calls it when a call needs more than the memory budget has left, after
 * it has freed prefixes that nothing uses. It runs on the thread of that call,
 * in the middle of the call, and on several threads at once. The cache that
 * needs the memory is locked; MLX is not. The callback may free sessions and
 * handles, and clear other caches with `release`. In the callback, a call on a
 * cache, forwards or answers in use returns ETKV_ERROR_STEP and does not wait;
 * the cache that needs the memory is always in use. If the callback itself
 * makes or grows a cache that does not fit, that call is refused without
 * another callback. The callback must not wait for another thread's call of
 * etkv, or for a lock that a thread holds during such a call. It must not
 * throw, or exit by longjmp.
 *
 * @param bytes  the missing bytes, at least 1.
 * @param user   the pointer that etkv_memory_budget_set_callback() received.
 * @return the bytes that it freed, for the log only.
 */
typedef uint64_t (*etkv_memory_callback)(uint64_t bytes, void* user);

/**
 * Sets the callback that may free memory before the memory budget refuses a
 * call. It replaces the earlier callback. When this call returns, the earlier
 * callback runs on no thread and is not called again. The callback is not
 * called for a request that exceeds the whole budget.
 *
 * @param callback  NULL removes the callback.
 * @param user      passed to the callback; the host owns it.
 *
 * ETKV_ERROR_STEP inside the callback.
 */
ETKV_API etkv_status etkv_memory_budget_set_callback(
    etkv_memory_callback callback,
    void* user,
    etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_MEMORY_H */
