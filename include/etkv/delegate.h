/*
 * Load options, checks and errors of the delegate. A part of etkv.h, whose
 * conventions hold here.
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
 * Sets the options with which the calling thread loads programs from now on. It
 * is for hosts whose ExecuTorch passes no backend options, as its Python
 * runtime does not. Options that ExecuTorch passes take precedence.
 *
 * @param cache_key  a session's key, or one of the registry; NULL for none.
 * @param logits     "all" or "last", or "proposed" for the MLX delegate: the rows
 *                   of the logits that the program gives. NULL for "all".
 * @param passes     the passes that change the program when it is loaded:
 *                   "default", those that make it faster on its device;
 *                   "interpreted", the same, and no step is captured as one
 *                   launch of a GPU; "none", those that the other options need.
 *                   NULL for "default".
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
 * Lets the buffers of all programs that were loaded with this name be zeros
 * again, as when they were loaded. The next call of each begins anew.
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
 * forgets it. Returns NULL where there is none. The caller frees it with
 * etkv_error_free(). A host that runs programs gets a code of ExecuTorch's
 * only; the message is here.
 */
ETKV_API etkv_error* etkv_delegate_take_error(void);

/**
 * Rolls back the step of a program for the CPU that the calling thread began
 * and that is not done: an operator of ExecuTorch failed in the middle. A host
 * that runs programs by itself calls it after each failed execution; execute()
 * of executorch.hpp does. Does nothing where no such step is open.
 */
ETKV_API void etkv_delegate_abort_forward(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_DELEGATE_H */
