/*
 * Shared by the tests of the C interface: a valid config, and checks of
 * refusals.
 */
#ifndef ETKV_TESTS_CPP_ABI_H
#define ETKV_TESTS_CPP_ABI_H

#include <stddef.h>
#include <stdint.h>

#include "check.h"
#include "etkv/etkv.h"

enum { LAYERS = 2, HEADS = 3, K_DIM = 8, V_DIM = 4, CAPACITY = 10 };

typedef struct {
  etkv_layer_config layers[LAYERS];
  etkv_cache_config config;
} setup;

/* A valid config, for tests to change. Do not copy it: it points to itself. */
static inline void set_up(setup* s) {
  memset(s, 0, sizeof(*s));
  for (int i = 0; i < LAYERS; ++i) {
    s->layers[i].struct_size = sizeof(s->layers[i]);
    s->layers[i].n_kv_heads = HEADS;
    s->layers[i].k_head_dim = K_DIM;
    s->layers[i].v_head_dim = V_DIM;
  }
  s->config.struct_size = sizeof(s->config);
  s->config.layers = s->layers;
  s->config.n_layers = LAYERS;
  s->config.capacity = CAPACITY;
}

static const char* const BACKEND = "MLXBackend";
static const char* const KIND = "contiguous";

static inline etkv_session* new_session_of(
    const char* kind,
    const etkv_cache_config* config) {
  etkv_session* session = NULL;
  etkv_error* error = NULL;
  const etkv_status status =
      etkv_session_new(BACKEND, kind, config, &session, &error);
  if (status != ETKV_OK) {
    printf("etkv_session_new: %s\n", etkv_error_message(error));
  }
  REQUIRE(status == ETKV_OK && session != NULL && error == NULL);
  return session;
}

static inline etkv_session* new_session(const etkv_cache_config* config) {
  return new_session_of(KIND, config);
}

static inline etkv_cache* cache_of(const etkv_session* session) {
  etkv_cache* cache = etkv_session_cache(session);
  REQUIRE(cache != NULL);
  return cache;
}

/* A non-null pointer, to detect writes to an out-parameter. */
static inline void* untouched(void) {
  static char place;
  return &place;
}
#define UNTOUCHED untouched()

#define CHECK_OK(call) CHECK_INT(call, ETKV_OK)

/* Checks a refused call: its status, and a message that contains `words`. */
static inline void check_refused(
    int line,
    etkv_status status,
    etkv_error* error,
    etkv_status wanted,
    const char* words) {
  check_int(__FILE__, line, "status", status, wanted);
  check_holds(__FILE__, line, "an error object", error != NULL);
  check_int(__FILE__, line, "its status", etkv_error_status(error), wanted);
  check_has(__FILE__, line, "its message", etkv_error_message(error), words);
  etkv_error_free(error);
}

/* `call` stores its error object in `error`. A second call without one must
 * return the same status. */
#define CHECK_REFUSED(call, wanted, words)                          \
  do {                                                              \
    etkv_error* error_object = NULL;                                \
    etkv_error** error = &error_object;                             \
    const etkv_status status = (call);                              \
    check_refused(__LINE__, status, error_object, (wanted), words); \
    error = NULL;                                                   \
    CHECK_INT(call, wanted);                                        \
  } while (0)

/* Checks that the call is refused, and makes no session. */
#define CHECK_NO_SESSION(backend, kind, config, wanted, words)          \
  do {                                                                  \
    etkv_session* session = UNTOUCHED;                                  \
    CHECK_REFUSED(                                                      \
        etkv_session_new((backend), (kind), (config), &session, error), \
        wanted,                                                         \
        words);                                                         \
    CHECK(session == UNTOUCHED);                                        \
  } while (0)

#endif /* ETKV_TESTS_CPP_ABI_H */
