/*
 * Statuses and errors.
 * A part of etkv.h, whose conventions apply here.
 */
#ifndef ETKV_ERROR_H
#define ETKV_ERROR_H

#include <stdint.h>

#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * The result of a call: ETKV_OK, or the class of the error. Numbers are never
 * reused.
 */
typedef int32_t etkv_status;
enum {
  ETKV_OK = 0,
  /** An argument is not valid: NULL, negative, of the wrong type or size. */
  ETKV_ERROR_INVALID_ARGUMENT = 1,
  /** The step or the sequence does not fit in the cache's capacity. */
  ETKV_ERROR_CAPACITY = 2,
  /**
   * A position is negative, leaves a gap, or does not follow the previous
   * position of its step.
   */
  ETKV_ERROR_POSITION = 3,
  /**
   * The registry has no cache under the key, or the program was loaded without
   * a cache.
   */
  ETKV_ERROR_NO_CACHE = 4,
  /** The kind is unknown, or caches of this kind do not support the call. */
  ETKV_ERROR_KIND = 5,
  /** A tensor's shape does not match the cache or the program. */
  ETKV_ERROR_SHAPE = 6,
  /** A tensor's dtype does not match the cache or the program. */
  ETKV_ERROR_DTYPE = 7,
  /** The program is damaged, foreign, or of a newer format. */
  ETKV_ERROR_PROGRAM = 8,
  /** The program needs something that this build does not have. */
  ETKV_ERROR_UNSUPPORTED = 9,
  /** The backend reported an error, for example that memory ran out. */
  ETKV_ERROR_BACKEND = 10,
  /**
   * A step is open on this cache, or the call needs a step and none is open.
   */
  ETKV_ERROR_STEP = 11,
  /** A defect inside etkv. */
  ETKV_ERROR_INTERNAL = 12,
  /**
   * A file of a cache's contents cannot be read or written, is damaged, or is
   * of another version, model or config.
   */
  ETKV_ERROR_FILE = 13,
  /** The program is of a version that this build does not read. */
  ETKV_ERROR_VERSION = 14,
};

/**
 * Returns the name of a status: its constant without ETKV_ERROR_, as in
 * "CAPACITY". ETKV_OK has "OK", and an unknown number "UNKNOWN". The string is
 * static.
 */
ETKV_API const char* etkv_status_name(etkv_status status);

/** An error: a status, and a message that names the value and the limit. */
typedef struct etkv_error etkv_error;

/**
 * Returns the status of `error`: ETKV_OK if it is NULL,
 * ETKV_ERROR_INVALID_ARGUMENT if it is no live handle.
 */
ETKV_API etkv_status etkv_error_status(const etkv_error* error);

/**
 * Returns the message of `error`, never NULL. The string lives until the error
 * is freed. The message is "" if `error` is NULL. It says so if `error` is no
 * live handle.
 */
ETKV_API const char* etkv_error_message(const etkv_error* error);

ETKV_API void etkv_error_free(etkv_error* error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_ERROR_H */
