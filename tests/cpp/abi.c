/*
 * The C interface, from C: what etkv.h says of arguments, structs, errors and
 * handles. Needs no program.
 */
#include <stddef.h>
#include <stdint.h>

#include "check.h"
#include "etkv/etkv.h"

/* ---- Layout ---------------------------------------------------------------
 */

/* Structs only grow at the end, so what is here stays. */
#if UINTPTR_MAX == UINT64_MAX
_Static_assert(sizeof(etkv_layer_config) >= 24, "etkv_layer_config");
_Static_assert(offsetof(etkv_layer_config, struct_size) == 0, "");
_Static_assert(offsetof(etkv_layer_config, n_kv_heads) == 8, "");
_Static_assert(offsetof(etkv_layer_config, k_head_dim) == 12, "");
_Static_assert(offsetof(etkv_layer_config, v_head_dim) == 16, "");
_Static_assert(offsetof(etkv_layer_config, window) == 20, "");

_Static_assert(sizeof(etkv_cache_config) >= 40, "etkv_cache_config");
_Static_assert(offsetof(etkv_cache_config, struct_size) == 0, "");
_Static_assert(offsetof(etkv_cache_config, layers) == 8, "");
_Static_assert(offsetof(etkv_cache_config, n_layers) == 16, "");
_Static_assert(offsetof(etkv_cache_config, capacity) == 24, "");
_Static_assert(offsetof(etkv_cache_config, min_chunk) == 28, "");
_Static_assert(offsetof(etkv_cache_config, k_format) == 32, "");
_Static_assert(offsetof(etkv_cache_config, v_format) == 36, "");

_Static_assert(sizeof(etkv_memory) >= 32, "etkv_memory");
_Static_assert(offsetof(etkv_memory, struct_size) == 0, "");
_Static_assert(offsetof(etkv_memory, allocated) == 8, "");
_Static_assert(offsetof(etkv_memory, used) == 16, "");
_Static_assert(offsetof(etkv_memory, at_capacity) == 24, "");

_Static_assert(sizeof(etkv_mlx_memory) >= 32, "etkv_mlx_memory");
_Static_assert(offsetof(etkv_mlx_memory, struct_size) == 0, "");
_Static_assert(offsetof(etkv_mlx_memory, active) == 8, "");
_Static_assert(offsetof(etkv_mlx_memory, cached) == 16, "");
_Static_assert(offsetof(etkv_mlx_memory, peak) == 24, "");
#endif

_Static_assert(sizeof(etkv_status) == 4, "etkv_status");
_Static_assert(sizeof(etkv_format) == 4, "etkv_format");
/* Numbers are never reused. */
_Static_assert(ETKV_OK == 0, "");
_Static_assert(ETKV_ERROR_INVALID_ARGUMENT == 1, "");
_Static_assert(ETKV_ERROR_CAPACITY == 2, "");
_Static_assert(ETKV_ERROR_POSITION == 3, "");
_Static_assert(ETKV_ERROR_NO_CACHE == 4, "");
_Static_assert(ETKV_ERROR_KIND == 5, "");
_Static_assert(ETKV_ERROR_SHAPE == 6, "");
_Static_assert(ETKV_ERROR_DTYPE == 7, "");
_Static_assert(ETKV_ERROR_PROGRAM == 8, "");
_Static_assert(ETKV_ERROR_UNSUPPORTED == 9, "");
_Static_assert(ETKV_ERROR_MLX == 10, "");
_Static_assert(ETKV_ERROR_STEP == 11, "");
_Static_assert(ETKV_ERROR_INTERNAL == 12, "");
_Static_assert(ETKV_FORMAT_DEFAULT == 0, "");
_Static_assert(ETKV_FORMAT_F32 == 1, "");
_Static_assert(ETKV_FORMAT_F16 == 2, "");
_Static_assert(ETKV_FORMAT_BF16 == 3, "");

/* ---- Helpers --------------------------------------------------------------
 */

enum { LAYERS = 2, HEADS = 3, K_DIM = 8, V_DIM = 4, CAPACITY = 10 };

typedef struct {
  etkv_layer_config layers[LAYERS];
  etkv_cache_config config;
} setup;

/* A config that is fine, for tests to spoil. Not to be copied: it points to
 * itself. */
static void set_up(setup* s) {
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

static etkv_session* new_session(const etkv_cache_config* config) {
  etkv_session* session = NULL;
  etkv_error* error = NULL;
  const etkv_status status =
      etkv_session_new(BACKEND, KIND, config, &session, &error);
  if (status != ETKV_OK) {
    printf("etkv_session_new: %s\n", etkv_error_message(error));
  }
  REQUIRE(status == ETKV_OK && session != NULL && error == NULL);
  return session;
}

/* Where a call is to write nothing. */
static char untouched;
#define UNTOUCHED ((void*)&untouched)

/* A call's refusal: its status, and a message that says `words`. */
static void check_refused(
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

/* `call` stores its error object in `error`. It is made once more without one,
 * which has to give the same status. */
#define CHECK_REFUSED(call, wanted, words)                          \
  do {                                                              \
    etkv_error* error_object = NULL;                                \
    etkv_error** error = &error_object;                             \
    const etkv_status status = (call);                              \
    check_refused(__LINE__, status, error_object, (wanted), words); \
    error = NULL;                                                   \
    CHECK_INT(call, wanted);                                        \
  } while (0)

/* Refused, and no session made. */
#define CHECK_NO_SESSION(backend, kind, config, wanted, words)          \
  do {                                                                  \
    etkv_session* session = UNTOUCHED;                                  \
    CHECK_REFUSED(                                                      \
        etkv_session_new((backend), (kind), (config), &session, error), \
        wanted,                                                         \
        words);                                                         \
    CHECK(session == UNTOUCHED);                                        \
  } while (0)

/* ---- Tests ----------------------------------------------------------------
 */

static void versions(void) {
  CHECK_INT(etkv_abi_version(), ETKV_ABI_VERSION);
  CHECK(strcmp(etkv_version(), ETKV_TEST_VERSION) == 0);
  CHECK(etkv_version() == etkv_version());
  const char* mlx = etkv_mlx_version();
  CHECK(mlx[0] >= '0' && mlx[0] <= '9' && strchr(mlx, '.') != NULL);
  CHECK(mlx == etkv_mlx_version());
}

static void errors(void) {
  CHECK_INT(etkv_error_status(NULL), ETKV_OK);
  CHECK(strcmp(etkv_error_message(NULL), "") == 0);
  etkv_error_free(NULL);

  etkv_error* first = NULL;
  etkv_error* second = NULL;
  CHECK_INT(etkv_cache_rewind(NULL, 0, &first), ETKV_ERROR_INVALID_ARGUMENT);
  CHECK_INT(
      etkv_session_new(NULL, KIND, NULL, UNTOUCHED, &second),
      ETKV_ERROR_INVALID_ARGUMENT);
  /* Each its own: the first one's words are there after the second. */
  CHECK(first != second);
  CHECK_HAS(etkv_error_message(first), "cache is NULL");
  CHECK_HAS(etkv_error_message(second), "backend_id is NULL");
  CHECK(etkv_error_message(first) == etkv_error_message(first));
  etkv_error_free(first);
  CHECK_HAS(etkv_error_message(second), "backend_id is NULL");
  etkv_error_free(second);

  /* The delegate has done nothing here, and errors of other calls are not its.
   */
  CHECK(etkv_delegate_take_error() == NULL);
}

static void null_arguments(void) {
  setup s;
  set_up(&s);
  const etkv_status invalid = ETKV_ERROR_INVALID_ARGUMENT;

  CHECK_NO_SESSION(NULL, KIND, &s.config, invalid, "backend_id is NULL");
  CHECK_NO_SESSION(BACKEND, NULL, &s.config, invalid, "kind is NULL");
  CHECK_NO_SESSION(BACKEND, KIND, NULL, invalid, "config is NULL");
  CHECK_REFUSED(
      etkv_session_new(BACKEND, KIND, &s.config, NULL, error),
      invalid,
      "session is NULL");

  bool fits = true;
  int32_t number = 7;
  etkv_memory memory = {sizeof(memory), 1, 2, 3};
  CHECK_REFUSED(
      etkv_cache_can_extend(NULL, 1, &fits, error), invalid, "cache is NULL");
  CHECK_REFUSED(
      etkv_cache_capacity(NULL, &number, error), invalid, "cache is NULL");
  CHECK_REFUSED(
      etkv_cache_length(NULL, &number, error), invalid, "cache is NULL");
  CHECK_REFUSED(etkv_cache_clear(NULL, true, error), invalid, "cache is NULL");
  CHECK_REFUSED(etkv_cache_rewind(NULL, 0, error), invalid, "cache is NULL");
  CHECK_REFUSED(
      etkv_cache_memory(NULL, &memory, error), invalid, "cache is NULL");
  CHECK(fits && number == 7 && memory.allocated == 1);

  etkv_session* session = new_session(&s.config);
  etkv_cache* cache = etkv_session_cache(session);
  REQUIRE(cache != NULL);
  CHECK_REFUSED(
      etkv_cache_can_extend(cache, 1, NULL, error), invalid, "fits is NULL");
  CHECK_REFUSED(
      etkv_cache_capacity(cache, NULL, error), invalid, "capacity is NULL");
  CHECK_REFUSED(
      etkv_cache_length(cache, NULL, error), invalid, "length is NULL");
  CHECK_REFUSED(
      etkv_cache_memory(cache, NULL, error), invalid, "memory is NULL");
  CHECK_REFUSED(etkv_mlx_memory_read(NULL, error), invalid, "memory is NULL");
  etkv_cache_free(cache);
  etkv_session_free(session);

  CHECK(etkv_session_key(NULL) == NULL);
  CHECK(etkv_session_cache(NULL) == NULL);
  etkv_session_free(NULL);
  etkv_cache_free(NULL);
}

static void struct_sizes(void) {
  setup s;
  const etkv_status invalid = ETKV_ERROR_INVALID_ARGUMENT;
  char words[64];

  /* The library tells the least that it takes: the size of the header's. */
  set_up(&s);
  snprintf(words, sizeof(words), "the least is %zu", sizeof(s.config));
  s.config.struct_size = 0;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, invalid, words);
  s.config.struct_size = sizeof(s.config) - 1;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, invalid, words);
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, invalid, "config.struct_size is");

  set_up(&s);
  snprintf(words, sizeof(words), "the least is %zu", sizeof(s.layers[0]));
  s.layers[0].struct_size = 0;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, invalid, words);
  s.layers[0].struct_size = sizeof(s.layers[0]) - 1;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, invalid, words);

  /* Layers lie one size apart. */
  set_up(&s);
  s.layers[1].struct_size = sizeof(s.layers[1]) + 8;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, invalid, "layer 1: struct_size");
  s.layers[1].struct_size = 0;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, invalid, "layer 1: struct_size");

  /* A later header's structs are longer; their tails are not looked at. */
  struct {
    etkv_layer_config known;
    uint64_t later[2];
  } layers[LAYERS];
  struct {
    etkv_cache_config known;
    uint64_t later[2];
  } config;
  memset(layers, 0xff, sizeof(layers));
  memset(&config, 0xff, sizeof(config));
  set_up(&s);
  for (int i = 0; i < LAYERS; ++i) {
    layers[i].known = s.layers[i];
    layers[i].known.struct_size = sizeof(layers[i]);
  }
  config.known = s.config;
  config.known.struct_size = sizeof(config);
  config.known.layers = &layers[0].known;
  etkv_session* session = new_session(&config.known);
  etkv_cache* cache = etkv_session_cache(session);

  struct {
    etkv_memory known;
    uint64_t later;
  } memory;
  memset(&memory, 0xff, sizeof(memory));
  memory.known.struct_size = sizeof(memory);
  CHECK_INT(etkv_cache_memory(cache, &memory.known, NULL), ETKV_OK);
  CHECK(memory.known.struct_size == sizeof(memory));
  CHECK_INT(memory.known.allocated, 0);
  CHECK_INT(memory.known.used, 0);
  CHECK_INT(
      memory.known.at_capacity,
      (uint64_t)LAYERS * CAPACITY * HEADS * (K_DIM + V_DIM) * 2);
  CHECK(memory.later == UINT64_MAX);

  snprintf(words, sizeof(words), "the least is %zu", sizeof(etkv_memory));
  etkv_memory small = {sizeof(small) - 1, 7, 8, 9};
  CHECK_REFUSED(etkv_cache_memory(cache, &small, error), invalid, words);
  small.struct_size = 0;
  CHECK_REFUSED(etkv_cache_memory(cache, &small, error), invalid, words);
  CHECK(small.allocated == 7 && small.used == 8 && small.at_capacity == 9);
  etkv_cache_free(cache);
  etkv_session_free(session);

  snprintf(words, sizeof(words), "the least is %zu", sizeof(etkv_mlx_memory));
  etkv_mlx_memory mlx = {sizeof(mlx) - 1, 7, 8, 9};
  CHECK_REFUSED(etkv_mlx_memory_read(&mlx, error), invalid, words);
  CHECK(mlx.active == 7 && mlx.cached == 8 && mlx.peak == 9);
  mlx.struct_size = sizeof(mlx);
  etkv_error* error = UNTOUCHED;
  CHECK_INT(etkv_mlx_memory_read(&mlx, &error), ETKV_OK);
  CHECK(error == UNTOUCHED);
  CHECK(mlx.active <= mlx.peak || mlx.peak == 0);
}

/* Every field is read from where the header has it: the message that refuses
 * its value names the field and the value. */
static void config_fields(void) {
  setup s;
  const etkv_status invalid = ETKV_ERROR_INVALID_ARGUMENT;

#define CHECK_FIELD(field, value, status, words)               \
  do {                                                         \
    set_up(&s);                                                \
    s.field = (value);                                         \
    CHECK_NO_SESSION(BACKEND, KIND, &s.config, status, words); \
  } while (0)

  CHECK_FIELD(config.capacity, 0, invalid, "capacity is 0, the least is 1");
  CHECK_FIELD(config.capacity, -1, invalid, "capacity is -1");
  CHECK_FIELD(config.capacity, INT32_MIN, invalid, "capacity is -2147483648");
  CHECK_FIELD(config.min_chunk, -3, invalid, "min_chunk is -3");
  CHECK_FIELD(config.k_format, 77, invalid, "k_format is 77");
  CHECK_FIELD(config.v_format, -88, invalid, "v_format is -88");
  CHECK_FIELD(config.k_format, ETKV_FORMAT_BF16 + 1, invalid, "k_format is 4");
  CHECK_FIELD(config.layers, NULL, invalid, "layers is NULL");
  CHECK_FIELD(config.n_layers, 0, invalid, "at least 1 layer");
  /* Refused before that many are looked for. */
  CHECK_FIELD(config.n_layers, SIZE_MAX, invalid, "n_layers is");
  CHECK_FIELD(config.n_layers, 1 << 20, invalid, "n_layers is 1048576");

  CHECK_FIELD(layers[1].n_kv_heads, 0, invalid, "layer 1: n_kv_heads is 0");
  CHECK_FIELD(layers[0].n_kv_heads, -5, invalid, "layer 0: n_kv_heads is -5");
  CHECK_FIELD(layers[1].k_head_dim, 0, invalid, "layer 1: k_head_dim is 0");
  CHECK_FIELD(layers[1].k_head_dim, -6, invalid, "layer 1: k_head_dim is -6");
  CHECK_FIELD(layers[1].v_head_dim, -8, invalid, "layer 1: v_head_dim is -8");
  CHECK_FIELD(
      layers[1].window, -1, ETKV_ERROR_INVALID_ARGUMENT, "window is -1");
#undef CHECK_FIELD

  /* Zero means the default. */
  set_up(&s);
  s.layers[0].v_head_dim = 0;
  s.layers[1].v_head_dim = 0;
  s.config.k_format = ETKV_FORMAT_F32;
  etkv_session* session = new_session(&s.config);
  etkv_cache* cache = etkv_session_cache(session);
  etkv_memory memory = {sizeof(memory), 1, 1, 1};
  CHECK_INT(etkv_cache_memory(cache, &memory, NULL), ETKV_OK);
  CHECK_INT(
      memory.at_capacity,
      (uint64_t)LAYERS * CAPACITY * HEADS * (K_DIM * 4 + K_DIM * 2));
  etkv_cache_free(cache);
  etkv_session_free(session);
}

static void kinds(void) {
  setup s;
  set_up(&s);
  CHECK_NO_SESSION(BACKEND, "tapestry", &s.config, ETKV_ERROR_KIND, "tapestry");
  /* And says which there are. */
  CHECK_NO_SESSION(BACKEND, "", &s.config, ETKV_ERROR_KIND, KIND);
  CHECK_NO_SESSION("Nobody", KIND, &s.config, ETKV_ERROR_KIND, "Nobody");
  CHECK_NO_SESSION("", KIND, &s.config, ETKV_ERROR_KIND, BACKEND);
  CHECK_NO_SESSION(
      BACKEND, "\xff\xfe", &s.config, ETKV_ERROR_INVALID_ARGUMENT, "UTF-8");
  CHECK_NO_SESSION(
      "\xc3", KIND, &s.config, ETKV_ERROR_INVALID_ARGUMENT, "UTF-8");
}

static void an_empty_cache(void) {
  setup s;
  set_up(&s);
  etkv_session* session = new_session(&s.config);
  /* The config is copied. */
  memset(&s, 0xff, sizeof(s));
  etkv_cache* cache = etkv_session_cache(session);
  etkv_error* error = UNTOUCHED;

  int32_t number = -1;
  CHECK_INT(etkv_cache_capacity(cache, &number, &error), ETKV_OK);
  CHECK_INT(number, CAPACITY);
  CHECK_INT(etkv_cache_length(cache, &number, &error), ETKV_OK);
  CHECK_INT(number, 0);

  bool fits = false;
  CHECK_INT(etkv_cache_can_extend(cache, 0, &fits, &error), ETKV_OK);
  CHECK(fits);
  fits = false;
  CHECK_INT(etkv_cache_can_extend(cache, CAPACITY, &fits, &error), ETKV_OK);
  CHECK(fits);
  CHECK_INT(etkv_cache_can_extend(cache, CAPACITY + 1, &fits, &error), ETKV_OK);
  CHECK(!fits);
  fits = true;
  CHECK_INT(etkv_cache_can_extend(cache, INT32_MAX, &fits, &error), ETKV_OK);
  CHECK(!fits);
  CHECK_INT(etkv_cache_rewind(cache, 0, &error), ETKV_OK);
  CHECK_INT(etkv_cache_clear(cache, false, &error), ETKV_OK);
  CHECK_INT(etkv_cache_clear(cache, true, &error), ETKV_OK);
  CHECK_INT(etkv_cache_clear(cache, true, &error), ETKV_OK);
  /* Success writes no error. */
  CHECK(error == UNTOUCHED);

  fits = true;
  CHECK_REFUSED(
      etkv_cache_can_extend(cache, -1, &fits, error),
      ETKV_ERROR_INVALID_ARGUMENT,
      "n is -1");
  CHECK_REFUSED(
      etkv_cache_can_extend(cache, INT32_MIN, &fits, error),
      ETKV_ERROR_INVALID_ARGUMENT,
      "n is -2147483648");
  CHECK(fits);
  CHECK_REFUSED(
      etkv_cache_rewind(cache, 1, error), ETKV_ERROR_POSITION, "length 1");
  CHECK_REFUSED(
      etkv_cache_rewind(cache, -1, error), ETKV_ERROR_POSITION, "length -1");
  CHECK_REFUSED(
      etkv_cache_rewind(cache, INT32_MAX, error),
      ETKV_ERROR_POSITION,
      "2147483647");
  CHECK_REFUSED(
      etkv_cache_rewind(cache, INT32_MIN, error),
      ETKV_ERROR_POSITION,
      "-2147483648");

  etkv_cache_free(cache);
  etkv_session_free(session);
}

static void keys_and_handles(void) {
  enum { SESSIONS = 64 };
  setup s;
  set_up(&s);
  etkv_session* sessions[SESSIONS];
  for (int i = 0; i < SESSIONS; ++i) {
    sessions[i] = new_session(&s.config);
    const char* key = etkv_session_key(sessions[i]);
    REQUIRE(key != NULL && key[0] != '\0');
    CHECK(key == etkv_session_key(sessions[i]));
    for (int j = 0; j < i; ++j) {
      CHECK(strcmp(key, etkv_session_key(sessions[j])) != 0);
    }
  }
  /* Handles of one cache are each their own, and outlive the session. */
  etkv_cache* one = etkv_session_cache(sessions[0]);
  etkv_cache* two = etkv_session_cache(sessions[0]);
  REQUIRE(one != NULL && two != NULL);
  CHECK(one != two);
  char first_key[64];
  snprintf(first_key, sizeof(first_key), "%s", etkv_session_key(sessions[0]));
  for (int i = 0; i < SESSIONS; ++i) {
    etkv_session_free(sessions[i]);
  }
  int32_t capacity = 0;
  CHECK_INT(etkv_cache_capacity(one, &capacity, NULL), ETKV_OK);
  CHECK_INT(capacity, CAPACITY);
  etkv_cache_free(one);
  capacity = 0;
  CHECK_INT(etkv_cache_capacity(two, &capacity, NULL), ETKV_OK);
  CHECK_INT(capacity, CAPACITY);
  etkv_cache_free(two);

  /* A key is not used twice, not even after its session. */
  etkv_session* later = new_session(&s.config);
  CHECK(strcmp(first_key, etkv_session_key(later)) != 0);
  etkv_session_free(later);
}

int main(void) {
  versions();
  errors();
  null_arguments();
  struct_sizes();
  config_fields();
  kinds();
  an_empty_cache();
  keys_and_handles();
  return check_report();
}
