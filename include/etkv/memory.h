/*
 * Bytes of a cache's buffers.
 * A part of etkv.h, whose conventions hold here.
 */
#ifndef ETKV_MEMORY_H
#define ETKV_MEMORY_H

#include <stddef.h>
#include <stdint.h>

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
} etkv_memory;

#endif /* ETKV_MEMORY_H */
