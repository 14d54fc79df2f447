/*
 * Reports of caches, programs and the process, as JSON, for monitoring and debugging.
 * docs/reports.md lists the fields. Later versions may add fields; a field
 * never changes its meaning.
 */
#ifndef ETKV_REPORT_H
#define ETKV_REPORT_H

#include "etkv/cache.h"
#include "etkv/error.h"
#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Stores a report of a cache: kind, length, sequences, formats, bytes and slots
 * by layer, config, whether a step is open, and why the cache is poisoned if it
 * is. Waits for a step that a program is in the middle of. Returns
 * ETKV_ERROR_INTERNAL for a cache in which a defect happened, as every call
 * does.
 *
 * @param json  receives a JSON object, which the caller frees with
 *              etkv_string_free().
 */
ETKV_API etkv_status
etkv_cache_report(const etkv_cache* cache, char** json, etkv_error** error);

/**
 * Stores a report of this process: the memory budget, what is held and free of
 * it, and what each cache and each prefix that is kept holds. Waits for no
 * cache.
 *
 * @param json  receives a JSON object, which the caller frees with
 *              etkv_string_free().
 */
ETKV_API etkv_status etkv_process_report(char** json, etkv_error** error);

/**
 * Stores a description of a program: its inputs and outputs, operations,
 * attention layers, constants, the passes of this build over it, and the
 * operations that this build lacks.
 *
 * @param payload  the delegate's payload, of `n_bytes` bytes.
 * @param json     receives a JSON object, which the caller frees with
 *                 etkv_string_free().
 *
 * ETKV_ERROR_PROGRAM for a payload that is damaged or foreign.
 */
ETKV_API etkv_status etkv_program_describe(
    const uint8_t* payload,
    size_t n_bytes,
    char** json,
    etkv_error** error);

/**
 * Frees a string that a function of this header or of etkv/log.h stored. Free
 * each one once. Such a string is memory, not a handle: etkv_live_handles()
 * does not count it. Does nothing for NULL.
 */
ETKV_API void etkv_string_free(char* string);

#ifdef __cplusplus
}
#endif

#endif /* ETKV_REPORT_H */
