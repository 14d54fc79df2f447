/*
 * What hosts ask of the delegate besides what ExecuTorch passes on.
 * A part of etkv.h, whose conventions hold here.
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
 * Sets how the calling thread loads programs from now on, for hosts whose
 * ExecuTorch passes no backend options, as its Python runtime does not. Options
 * that it does pass go before these.
 *
 * @param cache_key  a session's key, or one of the registry; NULL for none.
 * @param logits     "all" or "last": which rows of the logits to compute; NULL
 *                   for "all".
 */
ETKV_API etkv_status etkv_delegate_set_load_options(
    const char* cache_key,
    const char* logits,
    etkv_error** error);

/**
 * Tells whether this build can run a program, from the delegate's payload of
 * `n_bytes` alone: ETKV_ERROR_UNSUPPORTED names every operation that it lacks, and
 * ETKV_ERROR_PROGRAM is for a payload that is damaged or foreign.
 */
ETKV_API etkv_status
etkv_delegate_check(const uint8_t* payload, size_t n_bytes, etkv_error** error);

/**
 * Takes the error that the delegate last reported on the calling thread, or
 * NULL. A host that runs programs is told a bare code of its own; the sentence
 * behind it is here. The caller frees it.
 */
ETKV_API etkv_error* etkv_delegate_take_error(void);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_DELEGATE_H */
