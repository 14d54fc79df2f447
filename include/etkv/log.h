/*
 * etkv's log: what a running cache tells of itself, passed to one callback.
 *
 * Targets, each with its own level if the filter says so:
 *
 *   etkv::core      caches: steps, growth, conversions, moves, rollbacks
 *   etkv::program   programs: loading, passes, forwards
 *   etkv::api       this interface: calls that fail, defects that were caught
 *
 * docs/watching.md lists the messages and their fields.
 */
#ifndef ETKV_LOG_H
#define ETKV_LOG_H

#include <stddef.h>

#include "etkv/error.h"
#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/** How much a message matters. Numbers are never reused. */
typedef int32_t etkv_log_level;
enum {
  /** A cache is poisoned, a defect was caught. */
  ETKV_LOG_ERROR = 1,
  /** A step was refused or rolled back, a conversion failed. */
  ETKV_LOG_WARN = 2,
  /** A program was loaded, a cache was converted. */
  ETKV_LOG_INFO = 3,
  /** What was done, and how long it took: steps, growth, passes. */
  ETKV_LOG_DEBUG = 4,
  /** What each layer of a step does. */
  ETKV_LOG_TRACE = 5,
};

/**
 * Takes a message: one line of text, with its fields as `name=value` behind it and
 * the spans that it is in before it, as in
 * `step{tokens=1 first=7 mask=none read=8}: done took_us=412`.
 *
 * Strings live as long as the call. It may be called on any thread, on several at
 * once, while a cache, MLX or both are taken. So it must not call etkv, wait for a
 * thread that does or for a lock that such a thread has, throw or exit by longjmp: it
 * keeps the message, or writes it.
 */
typedef void (*etkv_log_callback)(
    etkv_log_level level,
    const char* target,
    const char* message,
    void* user);

/**
 * Has `callback` called with the messages that `filter` lets pass, from now on, in
 * the place of the callback that was there. NULL removes it. When this returns, the
 * callback that was there runs on no thread and is not called again.
 *
 * Without a callback nothing is formatted.
 *
 * @param filter  in the syntax of Rust's RUST_LOG: a level (`error`, `warn`, `info`,
 *                `debug`, `trace`, `off`), or targets with a level each, as in
 *                `warn,etkv::core=debug`. NULL for `info`.
 * @param user    is passed to the callback.
 *
 * ETKV_ERROR_INVALID_ARGUMENT for a filter that cannot be read;
 * ETKV_ERROR_UNSUPPORTED where Rust code of this process has set a subscriber of
 * `tracing` itself, which gets the messages then; ETKV_ERROR_STEP inside the
 * callback.
 */
ETKV_API etkv_status etkv_set_log_callback(
    const char* filter,
    etkv_log_callback callback,
    void* user,
    etkv_error** error);

/**
 * The same without a callback: keeps the last `most` messages for etkv_log_take(). For
 * a host that runs programs while it has a lock which its callback would take: that
 * lock waits for MLX then, and MLX for the lock. ExecuTorch's Python module runs
 * programs with Python's lock taken.
 *
 * It takes the place of a callback, and etkv_set_log_callback() its place.
 * ETKV_ERROR_INVALID_ARGUMENT also where `most` is 0.
 */
ETKV_API etkv_status
etkv_log_keep(const char* filter, size_t most, etkv_error** error);

/**
 * Stores the messages that were kept, and forgets them: a list of objects, the oldest
 * first, with `level`, `target`, `message`, and `time` in seconds since 1970. NULL where
 * there is none. The caller frees it with etkv_string_free().
 */
ETKV_API etkv_status etkv_log_take(char** json, etkv_error** error);

#ifdef __cplusplus
}
#endif

#endif /* ETKV_LOG_H */
