/*
 * Bytes of caches' buffers, and their limit.
 * A part of etkv.h, whose conventions hold here.
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

/** Bytes of one layer's buffers. */
typedef struct etkv_layer_memory {
  size_t struct_size;
  uint64_t k_allocated;
  uint64_t k_used;
  uint64_t v_allocated;
  uint64_t v_used;
} etkv_layer_memory;

/** Bytes of a cache's buffers. */
typedef struct etkv_memory {
  size_t struct_size;
  /** Bytes of all buffers. */
  uint64_t allocated;
  /** Bytes of these that positions use. */
  uint64_t used;
  /** The most bytes that the cache can come to hold. */
  uint64_t at_capacity;
  /**
   * Room for the same numbers layer by layer, or NULL. The caller owns as many
   * structs as the cache has layers, `layers->struct_size` bytes apart, and
   * sets the `struct_size` of the first. `n_layers` is their number, 0 for
   * NULL.
   */
  etkv_layer_memory* layers;
  size_t n_layers;
  /**
   * Bytes of rows that it reads from a prefix, and that other caches may read
   * too. They are not among the others.
   */
  uint64_t shared;
} etkv_memory;

/** Bytes of the buffers of all caches in this process, and their limit. */
typedef struct etkv_memory_budget {
  size_t struct_size;
  /** The most bytes that they may hold, or 0 for no limit. */
  uint64_t limit;
  /**
   * Bytes that they hold. While a step grows buffers, or a conversion replaces
   * them, both the old and the new ones are held.
   */
  uint64_t held;
  /** The most that they have held or reserved. */
  uint64_t peak;
  /** The caches that there are, empty ones too. */
  size_t n_caches;
} etkv_memory_budget;

/**
 * Limits the bytes of the buffers of all caches in this process, of every
 * backend; 0 removes the limit, which is what a process begins with. A cache
 * that allocates upfront, a step that grows buffers, a conversion and a load
 * that would hold more fail with `ETKV_ERROR_BACKEND`, whose message has the
 * bytes, and change nothing. Less than is held is no error: caches keep what
 * they have, and grow no more until enough is free. Programs' weights and
 * what MLX keeps for reuse do not count, nor do caches that the application
 * implements.
 */
ETKV_API etkv_status etkv_memory_budget_set(uint64_t limit, etkv_error** error);

/** Fills `budget`. The caller sets its `struct_size` first. */
ETKV_API etkv_status
etkv_memory_budget_read(etkv_memory_budget* budget, etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_MEMORY_H */
