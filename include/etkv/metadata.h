/*
 * The metadata that a program has about its caches. A part of etkv.h, whose
 * conventions apply here.
 */
#ifndef ETKV_METADATA_H
#define ETKV_METADATA_H

#include <stddef.h>
#include <stdint.h>

#include "etkv/config.h"
#include "etkv/error.h"
#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/** The facts of a program's caches. */
typedef struct etkv_metadata {
  size_t struct_size;
  /**
   * The layers that attend, or NULL. The caller owns one struct for each such
   * layer, `layers->struct_size` bytes apart, and sets the `struct_size` of the
   * first. `n_layers` is their number, 0 for NULL; etkv stores the number of
   * the program's attention layers there.
   */
  etkv_layer_config* layers;
  size_t n_layers;
  /** Like `layers`, for recurrent layers. */
  etkv_recurrent_layer_config* recurrent_layers;
  size_t n_recurrent_layers;
  /** The maximum tokens of one step; 0 if the program does not report it. */
  int32_t max_step_tokens;
  /**
   * The context length that the program was exported for; 0 if the program does
   * not report it.
   */
  int32_t context_length;
} etkv_metadata;

/**
 * Returns the name of a constant method that etkv_metadata_read() uses, or NULL
 * if `index` is not below their number. The string is static.
 */
ETKV_API const char* etkv_metadata_name(size_t index);

/**
 * Fills `metadata` from constant methods of a program. The caller sets
 * `metadata->struct_size` first. Call it once with NULL as `layers` and
 * `recurrent_layers` to get the numbers of layers, and again to get the layers.
 *
 * @param constants  a JSON object with the values of the methods that the
 *                   program has, by name: an integer, a string, or an array of
 *                   a tensor's integers. Other names are ignored.
 *
 * If the program has `kv_cache.schema_version`, it has `kv_cache.n_layers`
 * layers that attend. `kv_cache.n_kv_heads`, `head_dim`, `v_head_dim`,
 * `window`, `sinks`, `chunk` and `values_in_keys` describe these layers: each
 * is an integer for all layers, or an array with one integer for each layer.
 * `n_kv_heads` and `head_dim` are required, the others are optional.
 * `kv_cache.dtype` is the dtype that the program computes in: f32, f16 or bf16.
 * It is optional.
 *
 * In version 1 all layers attend. In version 2, `kv_cache.n_layers` may be 0,
 * and `kv_cache.recurrent_layers` has 8 integers for each recurrent layer: the
 * fields of etkv_recurrent_layer_config in order. Programs with chunks have
 * version 3, with or without recurrent layers.
 *
 * Without `kv_cache.schema_version`, the layers come from the methods that
 * ExecuTorch's exporter writes: get_n_caches, get_kv_heads, get_head_dims and
 * get_windows.
 *
 * The maximum tokens of a step are get_prefill_chunk_size. The context length
 * is get_max_ctx_len, or else get_max_context_len, or else get_max_seq_len.
 *
 * ETKV_ERROR_PROGRAM for another version, and for a value that is absent or not
 * valid. The message names the method.
 */
ETKV_API etkv_status etkv_metadata_read(
    const char* constants,
    etkv_metadata* metadata,
    etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_METADATA_H */
