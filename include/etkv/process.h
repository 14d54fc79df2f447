/*
 * The memory of MLX and the handles of etkv in this process. A part of etkv.h,
 * whose conventions hold here.
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

/** Bytes that MLX holds in this process, for caches and programs together. */
typedef struct etkv_mlx_memory {
  size_t struct_size;
  /** In use. */
  uint64_t active;
  /** Free, kept for reuse. */
  uint64_t cached;
  /** The most that was in use at one time. */
  uint64_t peak;
} etkv_mlx_memory;

/** Fills `memory`. The caller sets its `struct_size` first. */
ETKV_API etkv_status
etkv_mlx_memory_read(etkv_mlx_memory* memory, etkv_error** error);

/**
 * Returns the number of handles, of every type, that were made and not freed.
 */
ETKV_API size_t etkv_live_handles(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_PROCESS_H */
