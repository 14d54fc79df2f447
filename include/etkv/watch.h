/*
 * Observing a running etkv: its log, reports, MLX's memory, and handles.
 * A part of etkv.h, whose conventions apply here.
 */
#ifndef ETKV_WATCH_H
#define ETKV_WATCH_H

#include <stddef.h>
#include <stdint.h>

#include "etkv/cache.h"
#include "etkv/error.h"
#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- The log ----------------------------------------------------------- */

/*
 * Targets of log messages. A filter may set a level for each target:
 *
 *   etkv::core      caches: steps, growth, conversions, moves, rollbacks
 *   etkv::program   programs: loading, passes, forwards
 *   etkv::api       this interface: calls that fail, defects that were caught
 *
 * docs/watching.md lists the messages and their fields.
 */

/** The level of a message. Numbers are never reused. */
typedef int32_t etkv_log_level;
enum {
  /** A cache is poisoned, or a defect was caught. */
  ETKV_LOG_ERROR = 1,
  /**
   * A program or a step is refused, a forward fails, a step is rolled back, or
   * the conversion at `quantized_kv_start` fails.
   */
  ETKV_LOG_WARN = 2,
  /** A program is loaded, or a cache is converted. */
  ETKV_LOG_INFO = 3,
  /** Work and the time that it took: steps, growth, passes. */
  ETKV_LOG_DEBUG = 4,
  /** The work of each layer of a step. */
  ETKV_LOG_TRACE = 5,
};

/**
 * Receives a message: one line of text. The line has the spans of the message,
 * then its text, then its fields as `name=value`, as in `step{tokens=1 first=7
 * mask=none read=8}: done took_us=412`.
 *
 * The strings live as long as the call. etkv calls the callback on any thread,
 * on several threads at once, and while it holds the locks of a cache, of MLX
 * or of both. So the callback may only keep or write the message. It must not
 * call etkv, or wait for a thread that calls etkv or for a lock that such a
 * thread holds. It must not throw, or exit by longjmp.
 *
 * @param level    the level of the message.
 * @param target   the target, as in "etkv::core".
 * @param message  the message.
 * @param user     the pointer that etkv_set_log_callback() received.
 */
typedef void (*etkv_log_callback)(
    etkv_log_level level,
    const char* target,
    const char* message,
    void* user);

/**
 * Sets the callback that receives the messages that `filter` lets pass. It
 * replaces the earlier callback. When this call returns, the earlier callback
 * runs on no thread and is not called again.
 *
 * @param filter    in the syntax of Rust's RUST_LOG: a level (`error`, `warn`,
 *                  `info`, `debug`, `trace`, `off`), or targets with a level
 *                  each, as in `warn,etkv::core=debug`. NULL for `info`.
 *                  Copied.
 * @param callback  NULL removes the callback. Without a callback, nothing is
 *                  formatted.
 * @param user      passed to the callback; the host owns it.
 *
 * ETKV_ERROR_INVALID_ARGUMENT for a filter that is not in that syntax.
 * ETKV_ERROR_UNSUPPORTED if Rust code of this process has set a subscriber
 * of `tracing`, which receives the messages instead. ETKV_ERROR_STEP inside the
 * callback.
 */
ETKV_API etkv_status etkv_set_log_callback(
    const char* filter,
    etkv_log_callback callback,
    void* user,
    etkv_error** error);

/**
 * Keeps the last `most` messages for etkv_log_take(), instead of calling a
 * callback. This call and etkv_set_log_callback() replace each other.
 *
 * Use it in a host that runs programs while it holds a lock that its callback
 * would take. With a callback, such a host can deadlock: the thread that holds
 * the lock waits for MLX, while the callback runs on a thread that holds MLX
 * and waits for the lock. ExecuTorch's Python module runs programs with
 * Python's lock held.
 *
 * @param filter  as for etkv_set_log_callback().
 * @param most    the number of messages, at least 1;
 *                ETKV_ERROR_INVALID_ARGUMENT for 0.
 *
 * The other errors are those of etkv_set_log_callback().
 */
ETKV_API etkv_status
etkv_log_keep(const char* filter, size_t most, etkv_error** error);

/**
 * Stores the kept messages, and forgets them.
 *
 * @param json  receives a JSON list of objects, the oldest message first, with
 *              `level`, `target`, `message`, and `time` in seconds since 1970;
 *              NULL where there is none. The caller frees the string with
 *              etkv_string_free().
 */
ETKV_API etkv_status etkv_log_take(char** json, etkv_error** error);

/* ---- Reports ----------------------------------------------------------- */

/*
 * Reports are JSON, for monitoring and debugging. docs/reports.md lists the
 * fields. Later versions may add fields; a field never changes its meaning.
 */

/**
 * Stores a report of a cache: kind, length, sequences, formats, bytes and slots
 * by layer, config, whether a step is open, and, if the cache is poisoned, why.
 * Waits for a running step of a program. Returns ETKV_ERROR_INTERNAL for a
 * cache in which a defect happened, as every call does.
 *
 * @param json  receives a JSON object, which the caller frees with
 *              etkv_string_free().
 */
ETKV_API etkv_status
etkv_cache_report(const etkv_cache* cache, char** json, etkv_error** error);

/**
 * Stores a report of this process: the memory budget, its used and free bytes,
 * and the bytes of each cache and each kept prefix. Waits for no cache.
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
 * Frees a string that a function stored. Free each one once. Such a string is
 * memory, not a handle: etkv_live_handles() does not count it. Does nothing for
 * NULL.
 */
ETKV_API void etkv_string_free(char* string);

/* ---- The process ------------------------------------------------------- */

/** Bytes that MLX holds in this process, for caches and programs together. */
typedef struct etkv_mlx_memory {
  size_t struct_size;
  /** Bytes in use. */
  uint64_t active;
  /** Free bytes that are kept for reuse. */
  uint64_t cached;
  /** The maximum that was in use at one time. */
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

#endif /* ETKV_WATCH_H */
