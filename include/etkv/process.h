/*
 * What the process holds: MLX's memory and etkv's handles.
 * A part of etkv.h, whose conventions hold here.
 */
#ifndef ETKV_PROCESS_H
#define ETKV_PROCESS_H

#include <stddef.h>
#include <stdint.h>

#include "etkv/error.h"
#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Bytes that MLX holds in this process, caches and programs together. */
typedef struct etkv_mlx_memory {
  size_t struct_size;
  /** In use. */
  uint64_t active;
  /** Kept for reuse. */
  uint64_t cached;
  /** The most that was ever in use. */
  uint64_t peak;
} etkv_mlx_memory;

/** Fills `memory`, whose `struct_size` the caller has set. */
ETKV_API etkv_status
etkv_mlx_memory_read(etkv_mlx_memory* memory, etkv_error** error);

/** Handles of every type that were made and not freed: 0 without a leak. */
ETKV_API size_t etkv_live_handles(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_PROCESS_H */
