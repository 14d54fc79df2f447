/*
 * What a cache is to be, and what it will hold.
 * A part of etkv.h, whose conventions hold here.
 */
#ifndef ETKV_CONFIG_H
#define ETKV_CONFIG_H

#include <stddef.h>
#include <stdint.h>

#include "etkv/error.h"
#include "etkv/export.h"
#include "etkv/memory.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * How keys or values are stored, by name. Independent of what the model computes
 * in; keys and values need not have the same.
 *
 *   "f32", "f16", "bf16"
 *       floats; "f16" where nothing is said
 *   "affine<bits>g<group>", as in "affine4g64"
 *       integers of 2, 3, 4, 5, 6 or 8 bits with a scale and an offset for every
 *       32, 64 or 128 elements; "affine4" is "affine4g64"
 *   "mxfp8", "mxfp4"
 *       OCP microscaling: a scale for every 32 elements
 *   "nvfp4"
 *       NVIDIA's block float: a scale for every 16 elements
 *   "row-int4", "row-fp4"
 *       4 bits an element and one scale a row
 *
 * A row is one position of one KV head. Its head_dim is a multiple of the
 * format's group; of 8 for those with a scale a row.
 */

/**
 * Stores the bytes of one row of `head_dim` elements, its scales among them.
 * Also tells whether there is a format of that name, and whether rows fit it.
 */
ETKV_API etkv_status etkv_format_row_bytes(
    const char* format,
    int32_t head_dim,
    uint64_t* bytes,
    etkv_error** error);

/** What one attention layer stores. An architecture fact, from the program. */
typedef struct etkv_layer_config {
  size_t struct_size;
  /** KV heads, not query heads. */
  int32_t n_kv_heads;
  /** Elements of one key. */
  int32_t k_head_dim;
  /** Elements of one value; 0 for the same as a key. */
  int32_t v_head_dim;
  /**
   * Positions that a query sees, itself among them; 0 for full history. Layers
   * with a window keep little more than that.
   */
  int32_t window;
  /** First positions that a query sees besides its window; 0 without one. */
  int32_t sinks;
  /** 0. */
  int32_t reserved;
} etkv_layer_config;

/** How buffers grow as positions come: up to what the capacity needs. */
typedef int32_t etkv_growth;
enum {
  /** `min_chunk` slots, doubled as needed. */
  ETKV_GROWTH_DOUBLING = 0,
  /** By `min_chunk` slots at a time. */
  ETKV_GROWTH_STEP = 1,
  /** To the slots that a step needs: least memory, a copy at each step. */
  ETKV_GROWTH_EXACT = 2,
  /** To the capacity, when the cache is made. */
  ETKV_GROWTH_UPFRONT = 3,
};

/** What a cache is to be. */
typedef struct etkv_cache_config {
  size_t struct_size;
  /** `n_layers` layers, `layers->struct_size` bytes apart. */
  const etkv_layer_config* layers;
  size_t n_layers;
  /** Storage of keys and of values, by name; NULL for "f16". */
  const char* k_format;
  const char* v_format;
  /** Storage of both before `quantized_kv_start`: a float format. */
  const char* float_format;
  /** The most positions that it holds: the session's context length. */
  int32_t capacity;
  /**
   * The most tokens of one step, where layers have windows: they keep so much
   * more that a step can be rolled back. 0 for 512.
   */
  int32_t max_step_tokens;
  etkv_growth growth;
  /** Slots of a growth that has chunks; 0 for 256. */
  int32_t min_chunk;
  /**
   * Where it is more than 0: positions are stored in `float_format` until there
   * are so many, and are then converted to `k_format` and `v_format`, once.
   */
  int32_t quantized_kv_start;
  /** 0. */
  int32_t reserved;
} etkv_cache_config;

/**
 * Fills `memory` with what a cache of kind "contiguous" and this config will hold
 * when it has grown to `length` positions, to the byte, before any is made.
 * `length` is at most the capacity.
 */
ETKV_API etkv_status etkv_cache_config_estimate(
    const etkv_cache_config* config,
    int32_t length,
    etkv_memory* memory,
    etkv_error** error);

/**
 * The same for the kinds "seq" and "tree", while one sequence lives in them.
 * `at_capacity` is that of any number of sequences: where layers have windows each
 * has its own, and all of them together may take a slot for every position.
 */
ETKV_API etkv_status etkv_cache_config_estimate_shared(
    const etkv_cache_config* config,
    int32_t length,
    etkv_memory* memory,
    etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_CONFIG_H */
