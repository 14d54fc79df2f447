/*
 * Load options, checks and errors of the delegate. A part of etkv.h, whose
 * conventions apply here.
 */
#ifndef ETKV_DELEGATE_H
#define ETKV_DELEGATE_H

#include <stddef.h>
#include <stdint.h>

#include "etkv/error.h"
#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Sets load options for the programs that the calling thread loads from now on.
 * Use it in a host that cannot pass backend options, such as ExecuTorch's
 * Python runtime. Options that ExecuTorch passes take precedence.
 *
 * @param cache_key  the key of a session or of a registry entry; NULL for none.
 * @param logits     the rows of logits that the program returns: "all", "last",
 *                   or, on the MLX delegate only, "proposed". NULL for "all".
 * @param passes     the passes that change the program when it is loaded:
 *                   "default" makes it faster on its device; "interpreted" does
 *                   the same but captures no step as a CUDA graph; "none" runs
 *                   only the passes that the other options need. NULL for
 *                   "default".
 * @param buffers    a name for the buffers that the program keeps between its
 *                   calls, such as a cache in its graph; NULL for none. See
 *                   etkv_delegate_reset_buffers().
 */
ETKV_API etkv_status etkv_delegate_set_load_options(
    const char* cache_key,
    const char* logits,
    const char* passes,
    const char* buffers,
    etkv_error** error);

/**
 * Sets the buffers of all programs that were loaded with this name to zeros,
 * their values after loading. The next call of each program starts afresh.
 *
 * ETKV_ERROR_INVALID_ARGUMENT: no loaded program keeps buffers under the name.
 */
ETKV_API etkv_status
etkv_delegate_reset_buffers(const char* buffers, etkv_error** error);

/**
 * Checks whether this build can run a program. `payload` is the delegate's
 * payload, of `n_bytes` bytes.
 *
 * ETKV_ERROR_UNSUPPORTED names every operation that this build lacks.
 * ETKV_ERROR_PROGRAM is for a payload that is damaged or foreign.
 */
ETKV_API etkv_status
etkv_delegate_check(const uint8_t* payload, size_t n_bytes, etkv_error** error);

/**
 * Returns the error that the delegate last reported on the calling thread, and
 * forgets it. Returns NULL if there is none. The caller frees it with
 * etkv_error_free(). ExecuTorch gives the host only an error code; this
 * function returns the message.
 */
ETKV_API etkv_error* etkv_delegate_take_error(void);

/**
 * Rolls back the unfinished step that the calling thread began in a CPU
 * program, after an operator of ExecuTorch failed in the middle of the step. A
 * host that runs programs itself calls it after each failed execution;
 * execute() of executorch.hpp does so. Does nothing if no such step is open.
 */
ETKV_API void etkv_delegate_abort_forward(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_DELEGATE_H */
