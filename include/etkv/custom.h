/*
 * Kinds of the host's own.
 * A part of etkv.h, whose conventions hold here.
 */
#ifndef ETKV_CUSTOM_H
#define ETKV_CUSTOM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "etkv/cache.h"
#include "etkv/error.h"
#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * A kind that the host makes of one that is there: the inner cache keeps rows and
 * positions, and the host's callbacks are around it. That is enough to ration, to
 * evict, to write down what happens, or to refuse; not to store rows another way.
 *
 * `inner` is the host's handle on the inner cache: every function of this header
 * takes it, etkv_cache_as_seq() and others among them. It lives from `create`
 * until `destroy` has returned, and is not to be freed. While a step is open, the
 * inner cache refuses to be changed.
 *
 * A callback that fails returns its status and stores an error of
 * etkv_error_new(), or none; it is taken over, and told to who made the call. One
 * that is NULL leaves the inner cache to it.
 */
typedef struct etkv_cache_vtable {
  size_t struct_size;
  /** A cache of the kind is made: stores in `state` what the others get. */
  etkv_status (*create)(
      void* context,
      etkv_cache* inner,
      void** state,
      etkv_error** error);
  /** The last owner of the cache is gone. Not called where `create` failed. */
  void (*destroy)(void* state);
  /**
   * In place of the inner cache's, which it may change; `n` is at least 0. Where it
   * fails they do not fit, and nobody is told why.
   */
  etkv_status (*can_extend)(
      void* state,
      etkv_cache* inner,
      int32_t n,
      bool* fits,
      etkv_error** error);
  /**
   * A program is about to make a step of `n` tokens with these positions. The
   * inner cache can still be changed, to make room for them.
   */
  etkv_status (*begin_step)(
      void* state,
      etkv_cache* inner,
      const int32_t* positions,
      size_t n,
      etkv_error** error);
  /** The step has been, or has not: once for each `begin_step` that worked. */
  void (*end_step)(void* state, etkv_cache* inner, bool committed);
  /** In place of the inner cache's. */
  etkv_status (
      *clear)(void* state, etkv_cache* inner, bool release, etkv_error** error);
  /** In place of the inner cache's. */
  etkv_status (*rewind)(
      void* state,
      etkv_cache* inner,
      int32_t length,
      etkv_error** error);
} etkv_cache_vtable;

/**
 * Makes a kind known, for as long as the process lives. Its caches have the faces
 * that those of `base` have.
 *
 * @param backend_id  the backend that will use it: "MLXBackend".
 * @param kind        its name, which no kind of that backend has yet.
 * @param base        the kind of "MLXBackend" that it is made of.
 * @param vtable      copied; its functions, and `context`, are to live as long.
 */
ETKV_API etkv_status etkv_builder_register(
    const char* backend_id,
    const char* kind,
    const char* base,
    const etkv_cache_vtable* vtable,
    void* context,
    etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_CUSTOM_H */
