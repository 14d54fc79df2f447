/*
 * etkv: the KV cache of an ExecuTorch program, as a library.
 *
 * The C interface. `etkv.hpp` wraps it for C++; `executorch.hpp` adds what
 * names ExecuTorch.
 *
 * Conventions
 *   Names     etkv_<type>_<verb>. `_new` makes a handle, `_free` gives it back;
 *             freeing NULL does nothing.
 *   Results   Every function that can fail returns an etkv_status and takes,
 *             last, `etkv_error** error`. On failure it stores an error object
 *             there, which the caller frees; pass NULL to ignore it. Nothing
 *             else changes: out-parameters are written on success only, and the
 *             object acted on is as it was.
 *   Structs   begin with `struct_size`, which the caller sets to the size it was
 *             compiled with. They only ever grow at the end.
 *   Strings   are UTF-8 and end in a zero byte.
 *   Defects   inside become ETKV_ERROR_INTERNAL. A program that one happened in
 *             refuses everything afterwards but being destroyed; a step that was
 *             open is undone.
 *
 * Ownership
 *   A session owns an entry of the process-wide cache registry, under a key that
 *   is unique in the process. A program that is loaded with that key shares the
 *   cache. The cache lives until the session, every handle from
 *   etkv_session_cache(), and every program bound to it are gone, in any order.
 *
 * Threads
 *   Handles may be used and freed on any thread, one call at a time for each.
 *   Several handles may share one cache and be used from several threads: calls
 *   on one cache are serialised inside. A call made while a program is in the
 *   middle of a step on that cache waits for the step to end.
 */
#ifndef ETKV_ETKV_H
#define ETKV_ETKV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define ETKV_API __attribute__((visibility("default")))
#else
#define ETKV_API
#endif

/* ---- Version ------------------------------------------------------------ */

/** The interface that this header describes; grows with every addition. */
#define ETKV_ABI_VERSION 1

/** The interface that the linked library has; at least ETKV_ABI_VERSION. */
ETKV_API uint32_t etkv_abi_version(void);

/** The library's version, as "major.minor.patch". Static. */
ETKV_API const char* etkv_version(void);

/** The version of the MLX that the process runs on. Static. */
ETKV_API const char* etkv_mlx_version(void);

/* ---- Errors ------------------------------------------------------------- */

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
  /** MLX reported an error, out of memory among them. */
  ETKV_ERROR_MLX = 10,
  /** A step is open on this cache, or none is. */
  ETKV_ERROR_STEP = 11,
  /** A defect inside etkv. */
  ETKV_ERROR_INTERNAL = 12,
};

/** An error: a status and a sentence that names the value and the limit. */
typedef struct etkv_error etkv_error;

/** The status of `error`; ETKV_OK if it is NULL. */
ETKV_API etkv_status etkv_error_status(const etkv_error* error);

/** The message of `error`, valid until it is freed; "" if it is NULL. */
ETKV_API const char* etkv_error_message(const etkv_error* error);

ETKV_API void etkv_error_free(etkv_error* error);

/**
 * Takes the error that the delegate last reported on the calling thread, or
 * NULL. A host that runs programs is told a bare code of its own; the sentence
 * behind it is here. The caller frees it.
 */
ETKV_API etkv_error* etkv_delegate_take_error(void);

/* ---- The process ----------------------------------------------------- */

/** Bytes that MLX holds in this process, caches and programs together. */
typedef struct etkv_mlx_memory {
  size_t struct_size;
  /** In use. */
  uint64_t active;
  /** Kept for reuse. */
  uint64_t cached;
  /** The most that was ever in use. */
  uint64_t peak;
} etkv_mlx_memory;

/** Fills `memory`, whose `struct_size` the caller has set. */
ETKV_API etkv_status
etkv_mlx_memory_read(etkv_mlx_memory* memory, etkv_error** error);

/* ---- Configuration ------------------------------------------------------ */

/** How keys and values are stored. Independent of what the model computes in.
 */
typedef int32_t etkv_format;
enum {
  /** The default: ETKV_FORMAT_F16. */
  ETKV_FORMAT_DEFAULT = 0,
  ETKV_FORMAT_F32 = 1,
  ETKV_FORMAT_F16 = 2,
  ETKV_FORMAT_BF16 = 3,
};

/** What one attention layer stores. An architecture fact, from the program. */
typedef struct etkv_layer_config {
  size_t struct_size;
  /** KV heads, not query heads. */
  int32_t n_kv_heads;
  /** Elements of one key. */
  int32_t k_head_dim;
  /** Elements of one value; 0 for the same as a key. */
  int32_t v_head_dim;
  /**
   * Positions that a query sees, itself among them; 0 for full history. Layers
   * with a window keep little more than that, and take at most 512 tokens in a
   * step.
   */
  int32_t window;
} etkv_layer_config;

/** What a cache is to be. */
typedef struct etkv_cache_config {
  size_t struct_size;
  /** `n_layers` layers, `layers->struct_size` bytes apart. */
  const etkv_layer_config* layers;
  size_t n_layers;
  /** The most positions that it holds: the session's context length. */
  int32_t capacity;
  /** Slots of the first allocation, doubled as needed; 0 for 256. */
  int32_t min_chunk;
  etkv_format k_format;
  etkv_format v_format;
} etkv_cache_config;

/* ---- Caches ------------------------------------------------------------- */

/** A cache: the face that every kind has. */
typedef struct etkv_cache etkv_cache;

/** Gives back the handle; the cache lives on while others hold it. */
ETKV_API void etkv_cache_free(etkv_cache* cache);

/** Stores whether `n` (at least 0) more positions fit. */
ETKV_API etkv_status etkv_cache_can_extend(
    const etkv_cache* cache,
    int32_t n,
    bool* fits,
    etkv_error** error);

/** Stores the most positions that it holds. */
ETKV_API etkv_status etkv_cache_capacity(
    const etkv_cache* cache,
    int32_t* capacity,
    etkv_error** error);

/** Stores the positions that it holds now. */
ETKV_API etkv_status
etkv_cache_length(const etkv_cache* cache, int32_t* length, etkv_error** error);

/**
 * Forgets every position.
 *
 * @param release  whether to give the buffers back, too; otherwise the next
 *                 sequence reuses them.
 */
ETKV_API etkv_status
etkv_cache_clear(etkv_cache* cache, bool release, etkv_error** error);

/**
 * Forgets the positions from `length` on; 0 <= length <= the current length.
 * Where layers have windows, what they have dropped cannot be gone back to: that
 * is refused with ETKV_ERROR_POSITION, naming the least length.
 */
ETKV_API etkv_status
etkv_cache_rewind(etkv_cache* cache, int32_t length, etkv_error** error);

/** Bytes of a cache's buffers. */
typedef struct etkv_memory {
  size_t struct_size;
  /** Held now. */
  uint64_t allocated;
  /** Of these, in use by positions. */
  uint64_t used;
  /** What it would hold at capacity. */
  uint64_t at_capacity;
} etkv_memory;

/** Fills `memory`, whose `struct_size` the caller has set. */
ETKV_API etkv_status etkv_cache_memory(
    const etkv_cache* cache,
    etkv_memory* memory,
    etkv_error** error);

/* ---- Sessions ----------------------------------------------------------- */

/** A cache, and the key under which programs find it. */
typedef struct etkv_session etkv_session;

/**
 * Makes a cache and registers it under a new key.
 *
 * @param backend_id  the backend that will use it: "MLXBackend".
 * @param kind        "contiguous": one growing sequence. "seq" and "tree" are
 *                    caches of several sequences; what this interface has for
 *                    them is that of one.
 * @param config      what it is to be; copied.
 */
ETKV_API etkv_status etkv_session_new(
    const char* backend_id,
    const char* kind,
    const etkv_cache_config* config,
    etkv_session** session,
    etkv_error** error);

/** Takes the key out of the registry. Programs bound to the cache keep it. */
ETKV_API void etkv_session_free(etkv_session* session);

/** The key, valid until the session is freed; NULL if `session` is NULL. */
ETKV_API const char* etkv_session_key(const etkv_session* session);

/** Makes a handle on the session's cache; NULL if `session` is NULL. */
ETKV_API etkv_cache* etkv_session_cache(const etkv_session* session);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_ETKV_H */
