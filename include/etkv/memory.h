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
  /** Held. */
  uint64_t allocated;
  /** Of these, in use by positions. */
  uint64_t used;
  /** The most that it may come to hold. */
  uint64_t at_capacity;
  /**
   * Where the caller wants the same layer by layer: as many structs as there are
   * layers, `layers->struct_size` bytes apart, and their number. The first has
   * its `struct_size` set. NULL and 0 where not.
   */
  etkv_layer_memory* layers;
  size_t n_layers;
} etkv_memory;

#endif /* ETKV_MEMORY_H */
