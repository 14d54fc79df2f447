/*
 * Versions of the library and of its dependencies.
 * A part of etkv.h, whose conventions apply here.
 */
#ifndef ETKV_VERSION_H
#define ETKV_VERSION_H

#include <stdint.h>

#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * The version of the interface in this header. It grows with every addition.
 */
#define ETKV_ABI_VERSION 17

/**
 * Returns the version of the interface in the linked library. It must be at
 * least ETKV_ABI_VERSION.
 */
ETKV_API uint32_t etkv_abi_version(void);

/**
 * Returns the library's version, as "major.minor.patch". The string is static.
 */
ETKV_API const char* etkv_version(void);

/**
 * Returns the version of the MLX that the process runs on. The string is
 * static.
 */
ETKV_API const char* etkv_mlx_version(void);

/**
 * Returns the name of the library that multiplies matrices for MLX on the CPU:
 * OpenBLAS with its configuration, "MLX's own" or "Accelerate". The string is
 * static.
 */
ETKV_API const char* etkv_mlx_blas(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_VERSION_H */
