/*
 * The config of a cache, and estimates of its memory. A part of etkv.h, whose
 * conventions apply here.
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
 * Formats: how keys or values are stored, by name. A format does not depend on
 * the type that the model computes in. Keys and values may have different
 * formats.
 *
 *   "f32", "f16", "bf16"
 *       floats; "f16" is the default
 *   "affine<bits>g<group>", as in "affine4g64"
 *       integers of 2, 3, 4, 5, 6 or 8 bits with a scale and an offset for
 *       every 32, 64 or 128 elements; "affine4" is "affine4g32"
 *   "mxfp8", "mxfp4"
 *       OCP microscaling: a scale for every 32 elements
 *   "nvfp4"
 *       NVIDIA's block float: a scale for every 16 elements
 *   "row-int4", "row-fp4"
 *       4 bits per element and one scale per row
 *
 * A row is one position of one KV head. Its head_dim is a multiple of the
 * format's group, and a multiple of 8 for formats with one scale a row.
 */

/**
 * Stores the bytes of one row of `head_dim` elements, including its scales.
 * `head_dim` is at least 1. Fails if no format has that name, or if `head_dim`
 * does not fit the format.
 */
ETKV_API etkv_status etkv_format_row_bytes(
    const char* format,
    int32_t head_dim,
    uint64_t* bytes,
    etkv_error** error);

/** The dtype that the program computes keys and values in. */
typedef int32_t etkv_dtype;
enum {
  /** The dtype is unknown. */
  ETKV_DTYPE_UNKNOWN = 0,
  ETKV_DTYPE_F32 = 1,
  ETKV_DTYPE_F16 = 2,
  ETKV_DTYPE_BF16 = 3,
};

/**
 * The sizes of the rows that one attention layer stores. The architecture of
 * the model determines these numbers.
 */
typedef struct etkv_layer_config {
  size_t struct_size;
  /** The number of KV heads, not of query heads; at least 1. */
  int32_t n_kv_heads;
  /** The number of elements of one key, at least 1. */
  int32_t k_head_dim;
  /** The number of elements of one value; 0 means as many as a key has. */
  int32_t v_head_dim;
  /**
   * The number of positions that a query sees, including its own; 0 means full
   * history. A layer with a window keeps only these positions and about
   * `max_step_tokens` more.
   */
  int32_t window;
  /**
   * The number of attention sinks: first positions of the sequence that a query
   * sees in addition to its window. 0 for a layer without a window.
   */
  int32_t sinks;
  /**
   * The dtype that the program computes in. A cache whose config names no
   * format stores rows in this dtype. The field has no other effect.
   */
  etkv_dtype dtype;
  /**
   * 1 if a value is the first `v_head_dim` elements of its key, as with latent
   * attention; otherwise 0. The layer then stores keys alone, in `k_format`,
   * and ignores the values that a step passes. Only the first step after a
   * program is loaded compares the passed values with the keys, and is refused
   * with ETKV_ERROR_SHAPE if they differ.
   */
  int32_t values_in_keys;
  /**
   * The number of positions of a chunk; 0 for a layer without chunks. A query
   * sees its own position and the earlier positions of its chunk. Chunks begin
   * at multiples of this number. Such a layer has no window.
   */
  int32_t chunk;
} etkv_layer_config;

/** What a recurrent layer computes. */
typedef int32_t etkv_recurrent_kind;
enum {
  /** A causal depthwise convolution. */
  ETKV_RECURRENT_CONVOLUTION = 1,
  /** A linear recurrence, in which each head keeps a state. */
  ETKV_RECURRENT_RECURRENCE = 2,
};

/**
 * The sizes of one recurrent layer. The architecture of the model determines
 * these numbers. Fields of the other kind of layer are 0. A recurrent layer
 * stores float32 numbers, whatever the formats of keys and values are.
 */
typedef struct etkv_recurrent_layer_config {
  size_t struct_size;
  etkv_recurrent_kind kind;
  /** Convolution: the number of channels, at least 1. */
  int32_t channels;
  /**
   * Convolution: the number of positions that each output reads, including its
   * own; 1 to 64.
   */
  int32_t width;
  /** Recurrence: the number of heads of queries and keys, at least 1. */
  int32_t k_heads;
  /**
   * Recurrence: the number of heads of values and states, a multiple of
   * `k_heads`.
   */
  int32_t heads;
  /** Recurrence: the number of elements of a key, at least 1. */
  int32_t k_dim;
  /** Recurrence: the number of elements of a value, at least 1. */
  int32_t v_dim;
  /**
   * Recurrence: 1 if each channel of a key has its own decay, 0 if each head
   * has one.
   */
  int32_t channel_decay;
} etkv_recurrent_layer_config;

/** The value of `checkpoints` for a cache that makes no checkpoints. */
#define ETKV_NO_CHECKPOINTS (-1)

/**
 * How buffers grow as positions arrive. They never have more slots than the
 * capacity needs.
 */
typedef int32_t etkv_growth;
enum {
  /** To `min_chunk` slots, doubled as often as needed. */
  ETKV_GROWTH_DOUBLING = 0,
  /** By `min_chunk` slots, as often as needed. */
  ETKV_GROWTH_STEP = 1,
  /**
   * To exactly the slots that a step needs: the least memory, but a copy at
   * each step.
   */
  ETKV_GROWTH_EXACT = 2,
  /** To the capacity, when the cache is made. */
  ETKV_GROWTH_UPFRONT = 3,
};

/**
 * The config of a cache. The caller owns it and what it points to; functions
 * copy what they keep.
 */
typedef struct etkv_cache_config {
  size_t struct_size;
  /**
   * `n_layers` attention layers, `layers->struct_size` bytes apart. May be none
   * in a config with recurrent layers.
   */
  const etkv_layer_config* layers;
  size_t n_layers;
  /**
   * Formats of keys and of values, by name. NULL stores rows in the `dtype` of
   * the layers, or in "f16" if the dtype is unknown. All layers must then have
   * the same dtype. If the values of all layers are in their keys, `v_format`
   * must be NULL or the format of keys.
   */
  const char* k_format;
  const char* v_format;
  /**
   * Format of keys and values before `quantized_kv_start`: a float format. NULL
   * has the same meaning as for `k_format`.
   */
  const char* float_format;
  /**
   * The maximum number of positions: the session's context length.
   */
  int32_t capacity;
  /**
   * The maximum tokens of one step if layers have windows or
   * `quantized_kv_start` is set. Layers with windows keep that many additional
   * slots, so that a step can be rolled back. 0 means 512.
   */
  int32_t max_step_tokens;
  etkv_growth growth;
  /**
   * The number of slots by which buffers grow, for ETKV_GROWTH_DOUBLING and
   * ETKV_GROWTH_STEP. 0 means 256. Must be 0 for other growths.
   */
  int32_t min_chunk;
  /**
   * The length at which quantization begins. A shorter cache stores rows in
   * `float_format`. At this length all rows are converted once to `k_format`
   * and `v_format`. 0 uses these formats from the start.
   */
  int32_t quantized_kv_start;
  /** Must be 0. */
  int32_t reserved;
  /**
   * `n_recurrent_layers` recurrent layers, `recurrent_layers->struct_size`
   * bytes apart. Their ids begin at 0, as do those of attention layers.
   */
  const etkv_recurrent_layer_config* recurrent_layers;
  size_t n_recurrent_layers;
  /**
   * The number of states that a sequence keeps in each recurrence, 1 to 64; 0
   * means 2. The states are those at multiples of 64 positions. Each state
   * after the first lets the sequence be rewound by 64 more positions. No
   * effect without recurrent layers.
   */
  int32_t anchors;
  /**
   * The maximum number of checkpoints of etkv_cache_mark() in the cache, 1 to
   * 256. 0 means 32, and ETKV_NO_CHECKPOINTS means none. Each checkpoint keeps
   * the states of one position.
   */
  int32_t checkpoints;
} etkv_cache_config;

/**
 * Fills `memory` with the bytes of a cache of kind "contiguous" and this config
 * after it has grown to `length` positions. The numbers are exact to the byte,
 * and no cache is made. `length` is from 0 to the capacity. The caller sets
 * `memory->struct_size` first.
 */
ETKV_API etkv_status etkv_cache_config_estimate(
    const etkv_cache_config* config,
    int32_t length,
    etkv_memory* memory,
    etkv_error** error);

/**
 * Fills `memory` as etkv_cache_config_estimate() does, for the kinds "seq" and
 * "tree" while they hold one sequence. `at_capacity` is valid for any number of
 * sequences: each sequence has its own windows, and together these may need a
 * slot for every position.
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
