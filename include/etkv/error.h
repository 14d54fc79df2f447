/*
 * Statuses and errors.
 * A part of etkv.h, whose conventions hold here.
 */
#ifndef ETKV_ERROR_H
#define ETKV_ERROR_H

#include <stdint.h>

#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What went wrong. Numbers are never reused. */
typedef int32_t etkv_status;
enum {
  ETKV_OK = 0,
  /** An argument cannot be: NULL, negative, of the wrong type or size. */
  ETKV_ERROR_INVALID_ARGUMENT = 1,
  /** The step or the sequence does not fit in the cache's capacity. */
  ETKV_ERROR_CAPACITY = 2,
  /** A position is negative, leaves a gap, or breaks the run of its step. */
  ETKV_ERROR_POSITION = 3,
  /** No cache is known by this key, or the program was loaded without one. */
  ETKV_ERROR_NO_CACHE = 4,
  /** The cache is of a kind that cannot do this. */
  ETKV_ERROR_KIND = 5,
  /** A tensor's shape does not match the cache or the program. */
  ETKV_ERROR_SHAPE = 6,
  /** A tensor's dtype does not match the cache or the program. */
  ETKV_ERROR_DTYPE = 7,
  /** The program is damaged, foreign, or of a newer format. */
  ETKV_ERROR_PROGRAM = 8,
  /** The program needs something that this build does not have. */
  ETKV_ERROR_UNSUPPORTED = 9,
  /** The backend reported an error, out of memory among them. */
  ETKV_ERROR_BACKEND = 10,
  /** A step is open on this cache, or none is. */
  ETKV_ERROR_STEP = 11,
  /** A defect inside etkv. */
  ETKV_ERROR_INTERNAL = 12,
};

/**
 * The name of a status: that of its constant without ETKV_ERROR_, as in
 * "CAPACITY"; "OK" for ETKV_OK and "UNKNOWN" for other numbers. Static.
 */
ETKV_API const char* etkv_status_name(etkv_status status);

/** An error: a status and a sentence that names the value and the limit. */
typedef struct etkv_error etkv_error;

/**
 * The status of `error`; ETKV_OK if it is NULL, ETKV_ERROR_INVALID_ARGUMENT if it
 * is no live handle.
 */
ETKV_API etkv_status etkv_error_status(const etkv_error* error);

/**
 * The message of `error`, valid until it is freed; "" if it is NULL, and a
 * sentence that says so if it is no live handle. Never NULL.
 */
ETKV_API const char* etkv_error_message(const etkv_error* error);

ETKV_API void etkv_error_free(etkv_error* error);

/**
 * Makes an error, for a callback to store. NULL where `status` is that of no
 * error, or `message` is NULL or not UTF-8.
 */
ETKV_API etkv_error* etkv_error_new(etkv_status status, const char* message);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_ERROR_H */
