/*
 * Versions of the library and of what it runs on.
 * A part of etkv.h, whose conventions hold here.
 */
#ifndef ETKV_VERSION_H
#define ETKV_VERSION_H

#include <stdint.h>

#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/** The interface that this header describes; grows with every addition. */
#define ETKV_ABI_VERSION 4

/** The interface that the linked library has; at least ETKV_ABI_VERSION. */
ETKV_API uint32_t etkv_abi_version(void);

/** The library's version, as "major.minor.patch". Static. */
ETKV_API const char* etkv_version(void);

/** The version of the MLX that the process runs on. Static. */
ETKV_API const char* etkv_mlx_version(void);

/**
 * What multiplies matrices for MLX on the CPU: OpenBLAS with its configuration,
 * "MLX's own" or "Accelerate". A static string.
 */
ETKV_API const char* etkv_mlx_blas(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_VERSION_H */
