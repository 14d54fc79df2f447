/* Kinds that the host adds. A part of etkv.h, whose conventions hold here. */
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
 * A kind that the host adds, around a kind that exists. The inner cache keeps
 * rows and positions, and the host's callbacks run around its calls. They can
 * ration, evict, log or refuse. They cannot store rows in another way.
 *
 * `inner` is the host's handle on the inner cache. Every function of this
 * header takes it, etkv_cache_as_seq() included. It lives from `create` until
 * `destroy` returns; the host does not free it. While a step is open, the inner
 * cache refuses changes.
 *
 * A callback that fails returns its status. It may store an error of
 * etkv_error_new(), which etkv takes over and reports to the caller. Where a
 * callback is NULL, the inner cache handles the call.
 */
typedef struct etkv_cache_vtable {
  size_t struct_size;
  /**
   * Called when a cache of the kind is made. Stores in `state` what the other
   * callbacks receive. `context` is that of etkv_builder_register().
   */
  etkv_status (*create)(
      void* context,
      etkv_cache* inner,
      void** state,
      etkv_error** error);
  /**
   * Called when the last owner of the cache is gone. Not called where `create`
   * failed.
   */
  void (*destroy)(void* state);
  /**
   * Called in place of the inner cache's function; it may change the inner
   * cache. `n` is at least 0. A failure counts as false, and its error is not
   * reported. On the CPU backend the inner cache cannot be changed during a
   * step of another thread (ETKV_ERROR_STEP).
   */
  etkv_status (*can_extend)(
      void* state,
      etkv_cache* inner,
      int32_t n,
      bool* fits,
      etkv_error** error);
  /**
   * Called when a program begins a step of `n` tokens at these positions. The
   * inner cache can still be changed, to make room for them.
   */
  etkv_status (*begin_step)(
      void* state,
      etkv_cache* inner,
      const int32_t* positions,
      size_t n,
      etkv_error** error);
  /**
   * Called once for each `begin_step` that succeeded. `committed` is true where
   * the step committed, and false where it was rolled back.
   */
  void (*end_step)(void* state, etkv_cache* inner, bool committed);
  /** Called in place of the inner cache's function. */
  etkv_status (
      *clear)(void* state, etkv_cache* inner, bool release, etkv_error** error);
  /** Called in place of the inner cache's function. */
  etkv_status (*rewind)(
      void* state,
      etkv_cache* inner,
      int32_t length,
      etkv_error** error);
} etkv_cache_vtable;

/**
 * Adds a kind for as long as the process lives. Its caches have the functions
 * that those of `base` have: of sequences, and of trees.
 *
 * @param backend_id  the backend that uses the caches: "MLXBackend" or "cpu".
 * @param kind        a name, not empty, that no kind of that backend has yet.
 * @param base        the kind of that backend that the inner caches have.
 * @param vtable      copied; its functions must stay callable while the process
 *                    lives.
 * @param context     passed to `create`; must live as long. The host owns it.
 *
 * ETKV_ERROR_KIND for an unknown `base`.
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
