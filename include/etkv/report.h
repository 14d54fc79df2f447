/*
 * Reports as JSON, for monitoring and debugging: of a cache, and of a program.
 * docs/reports.md lists the fields. Fields may be added, none changes its meaning.
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
 * Stores what a cache is and holds: kind, length, sequences, formats, bytes and slots
 * by layer, config, whether a step is open, and why the cache is poisoned if it is.
 * Waits for a step that a program is in the middle of. A cache that a defect happened
 * in is refused as by every call.
 *
 * `json` is an object; the caller frees it with etkv_string_free().
 */
ETKV_API etkv_status
etkv_cache_report(const etkv_cache* cache, char** json, etkv_error** error);

/**
 * Stores what a program is, from the delegate's payload of `n_bytes`: its inputs and
 * outputs, operations, attention layers, constants, what this build makes of them,
 * and what it lacks. ETKV_ERROR_PROGRAM is for a payload that is damaged or foreign.
 *
 * `json` is an object; the caller frees it with etkv_string_free().
 */
ETKV_API etkv_status etkv_program_describe(
    const uint8_t* payload,
    size_t n_bytes,
    char** json,
    etkv_error** error);

/**
 * Frees a string that a function of this header stored, once. Such a string is memory,
 * not a handle: etkv_live_handles() does not count it. NULL is fine.
 */
ETKV_API void etkv_string_free(char* string);

#ifdef __cplusplus
}
#endif

#endif /* ETKV_REPORT_H */
