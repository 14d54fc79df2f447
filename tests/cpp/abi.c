/*
 * The C interface, from C: what etkv.h says of arguments, structs, errors and
 * handles. Needs no program.
 */
#include "abi.h"

/* ---- Layout ---------------------------------------------------------------
 */

/* Structs only grow at the end, so what is here stays. */
#if UINTPTR_MAX == UINT64_MAX
_Static_assert(sizeof(etkv_layer_config) >= 32, "etkv_layer_config");
_Static_assert(offsetof(etkv_layer_config, struct_size) == 0, "");
_Static_assert(offsetof(etkv_layer_config, n_kv_heads) == 8, "");
_Static_assert(offsetof(etkv_layer_config, k_head_dim) == 12, "");
_Static_assert(offsetof(etkv_layer_config, v_head_dim) == 16, "");
_Static_assert(offsetof(etkv_layer_config, window) == 20, "");
_Static_assert(offsetof(etkv_layer_config, sinks) == 24, "");
_Static_assert(offsetof(etkv_layer_config, dtype) == 28, "");

_Static_assert(sizeof(etkv_cache_config) >= 72, "etkv_cache_config");
_Static_assert(offsetof(etkv_cache_config, struct_size) == 0, "");
_Static_assert(offsetof(etkv_cache_config, layers) == 8, "");
_Static_assert(offsetof(etkv_cache_config, n_layers) == 16, "");
_Static_assert(offsetof(etkv_cache_config, k_format) == 24, "");
_Static_assert(offsetof(etkv_cache_config, v_format) == 32, "");
_Static_assert(offsetof(etkv_cache_config, float_format) == 40, "");
_Static_assert(offsetof(etkv_cache_config, capacity) == 48, "");
_Static_assert(offsetof(etkv_cache_config, max_step_tokens) == 52, "");
_Static_assert(offsetof(etkv_cache_config, growth) == 56, "");
_Static_assert(offsetof(etkv_cache_config, min_chunk) == 60, "");
_Static_assert(offsetof(etkv_cache_config, quantized_kv_start) == 64, "");
_Static_assert(offsetof(etkv_cache_config, reserved) == 68, "");

_Static_assert(sizeof(etkv_layer_memory) >= 40, "etkv_layer_memory");
_Static_assert(offsetof(etkv_layer_memory, struct_size) == 0, "");
_Static_assert(offsetof(etkv_layer_memory, k_allocated) == 8, "");
_Static_assert(offsetof(etkv_layer_memory, k_used) == 16, "");
_Static_assert(offsetof(etkv_layer_memory, v_allocated) == 24, "");
_Static_assert(offsetof(etkv_layer_memory, v_used) == 32, "");

_Static_assert(sizeof(etkv_memory) >= 48, "etkv_memory");
_Static_assert(offsetof(etkv_memory, struct_size) == 0, "");
_Static_assert(offsetof(etkv_memory, allocated) == 8, "");
_Static_assert(offsetof(etkv_memory, used) == 16, "");
_Static_assert(offsetof(etkv_memory, at_capacity) == 24, "");
_Static_assert(offsetof(etkv_memory, layers) == 32, "");
_Static_assert(offsetof(etkv_memory, n_layers) == 40, "");

_Static_assert(sizeof(etkv_range) >= 8, "etkv_range");
_Static_assert(offsetof(etkv_range, begin) == 0, "");
_Static_assert(offsetof(etkv_range, end) == 4, "");

_Static_assert(sizeof(etkv_memory_budget) >= 40, "etkv_memory_budget");
_Static_assert(offsetof(etkv_memory_budget, struct_size) == 0, "");
_Static_assert(offsetof(etkv_memory_budget, limit) == 8, "");
_Static_assert(offsetof(etkv_memory_budget, held) == 16, "");
_Static_assert(offsetof(etkv_memory_budget, peak) == 24, "");
_Static_assert(offsetof(etkv_memory_budget, n_caches) == 32, "");

_Static_assert(sizeof(etkv_mlx_memory) >= 32, "etkv_mlx_memory");
_Static_assert(offsetof(etkv_mlx_memory, struct_size) == 0, "");
_Static_assert(offsetof(etkv_mlx_memory, active) == 8, "");
_Static_assert(offsetof(etkv_mlx_memory, cached) == 16, "");
_Static_assert(offsetof(etkv_mlx_memory, peak) == 24, "");
#endif

_Static_assert(sizeof(etkv_status) == 4, "etkv_status");
_Static_assert(sizeof(etkv_growth) == 4, "etkv_growth");
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
_Static_assert(ETKV_ERROR_BACKEND == 10, "");
_Static_assert(ETKV_ERROR_STEP == 11, "");
_Static_assert(ETKV_ERROR_INTERNAL == 12, "");
_Static_assert(ETKV_ERROR_FILE == 13, "");
_Static_assert(ETKV_ERROR_VERSION == 14, "");
_Static_assert(ETKV_GROWTH_DOUBLING == 0, "");
_Static_assert(ETKV_GROWTH_STEP == 1, "");
_Static_assert(ETKV_GROWTH_EXACT == 2, "");
_Static_assert(ETKV_GROWTH_UPFRONT == 3, "");

/* ---- Tests ----------------------------------------------------------------
 */

static void versions(void) {
  CHECK_INT(etkv_abi_version(), ETKV_ABI_VERSION);
  CHECK(strcmp(etkv_version(), ETKV_TEST_VERSION) == 0);
  CHECK(etkv_version() == etkv_version());
  const char* mlx = etkv_mlx_version();
  CHECK(mlx[0] >= '0' && mlx[0] <= '9' && strchr(mlx, '.') != NULL);
  CHECK(mlx == etkv_mlx_version());
  CHECK(strlen(etkv_mlx_blas()) > 0);
  CHECK(etkv_mlx_blas() == etkv_mlx_blas());
}

/* A name is that of the constant, in every language. */
static void status_names(void) {
#define CHECK_NAME(name) \
  CHECK(strcmp(etkv_status_name(ETKV_ERROR_##name), #name) == 0)
  CHECK_NAME(INVALID_ARGUMENT);
  CHECK_NAME(CAPACITY);
  CHECK_NAME(POSITION);
  CHECK_NAME(NO_CACHE);
  CHECK_NAME(KIND);
  CHECK_NAME(SHAPE);
  CHECK_NAME(DTYPE);
  CHECK_NAME(PROGRAM);
  CHECK_NAME(UNSUPPORTED);
  CHECK_NAME(BACKEND);
  CHECK_NAME(STEP);
  CHECK_NAME(INTERNAL);
  CHECK_NAME(FILE);
  CHECK_NAME(VERSION);
  CHECK(strcmp(etkv_status_name(ETKV_OK), "OK") == 0);
  CHECK(strcmp(etkv_status_name(-1), "UNKNOWN") == 0);
  CHECK(strcmp(etkv_status_name(ETKV_ERROR_VERSION + 1), "UNKNOWN") == 0);
  CHECK(etkv_status_name(ETKV_ERROR_STEP) == etkv_status_name(ETKV_ERROR_STEP));
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
  etkv_delegate_abort_forward();
  CHECK(etkv_delegate_take_error() == NULL);
}

/* What they do to programs is in sessions.cpp. */
static void the_delegate(void) {
  const etkv_status invalid = ETKV_ERROR_INVALID_ARGUMENT;
  const uint8_t payload[24] = {0};

  CHECK_INT(
      etkv_delegate_set_load_options("a", "some", NULL, NULL, NULL), invalid);
  CHECK_INT(
      etkv_delegate_set_load_options("a", NULL, "some", NULL, NULL), invalid);
  CHECK_INT(
      etkv_delegate_set_load_options("a", "last", "none", "b", NULL), ETKV_OK);
  CHECK_INT(
      etkv_delegate_set_load_options(NULL, NULL, NULL, NULL, NULL), ETKV_OK);
  CHECK_INT(etkv_delegate_reset_buffers("b", NULL), invalid);
  CHECK_INT(etkv_delegate_reset_buffers(NULL, NULL), invalid);
  CHECK_INT(etkv_delegate_check(NULL, 1, NULL), invalid);
  CHECK_INT(etkv_delegate_check(payload, 24, NULL), ETKV_ERROR_PROGRAM);
  CHECK_INT(etkv_delegate_check(payload, 0, NULL), ETKV_ERROR_PROGRAM);
}

/* What they do is in generation.cpp. */
static void generations(void) {
  const etkv_status invalid = ETKV_ERROR_INVALID_ARGUMENT;
  const float logits[3] = {0.5f, 2.0f, 1.0f};
  const int64_t text[2] = {1, 0};
  const int32_t positions[2] = {0, 1};
  int64_t chosen[2] = {-7, -7};
  etkv_sampling sampling = {0};
  etkv_prompt prompt = {0};
  etkv_generation_options options = {0};
  etkv_generation* generation = UNTOUCHED;
  const etkv_generation* untouched_one = generation;
  int64_t token = -7;
  etkv_end end = -7;
  size_t n = 7;
  setup s;

  CHECK_INT(
      etkv_sampling_choose(NULL, logits, 3, NULL, 0, 0, 0, &token, NULL),
      ETKV_OK);
  CHECK_INT(token, 1);
  sampling.struct_size = sizeof(sampling);
  sampling.repetition_penalty = 4.0f;
  CHECK_INT(
      etkv_sampling_choose(&sampling, logits, 3, text, 2, 0, 0, &token, NULL),
      ETKV_OK);
  CHECK_INT(token, 2);
  sampling.top_k = -1;
  CHECK_INT(
      etkv_sampling_choose(&sampling, logits, 3, text, 2, 0, 0, &token, NULL),
      invalid);
  CHECK_INT(
      etkv_sampling_choose(NULL, NULL, 3, NULL, 0, 0, 0, &token, NULL),
      invalid);
  CHECK_INT(
      etkv_sampling_choose(NULL, logits, 3, NULL, 0, 0, 0, NULL, NULL),
      invalid);
  CHECK_INT(token, 2);

  set_up(&s);
  etkv_cache* cache = NULL;
  CHECK_INT(etkv_cache_new(BACKEND, KIND, &s.config, &cache, NULL), ETKV_OK);
  prompt.struct_size = sizeof(prompt);
  prompt.tokens = text;
  prompt.n_tokens = 2;
  options.struct_size = sizeof(options);
  options.max_tokens = 1;
  CHECK_INT(
      etkv_generation_new(NULL, &prompt, 1, &options, &generation, NULL),
      invalid);
  CHECK_INT(
      etkv_generation_new(cache, &prompt, 1, NULL, &generation, NULL), invalid);
  CHECK_INT(
      etkv_generation_new(cache, NULL, 1, &options, &generation, NULL),
      invalid);
  CHECK_INT(
      etkv_generation_new(cache, &prompt, 1, &options, NULL, NULL), invalid);
  /* No program is loaded with it. */
  CHECK_INT(
      etkv_generation_new(cache, &prompt, 1, &options, &generation, NULL),
      invalid);
  CHECK(generation == untouched_one);
  CHECK_INT(etkv_generation_warm_up(cache, NULL, NULL, NULL), invalid);
  CHECK_INT(
      etkv_generation_choose(cache, text, positions, 2, chosen, NULL), invalid);
  CHECK_INT(
      etkv_generation_choose(cache, NULL, positions, 2, chosen, NULL), invalid);
  CHECK_INT(
      etkv_generation_choose(cache, text, NULL, 2, chosen, NULL), invalid);
  CHECK_INT(
      etkv_generation_choose(cache, text, positions, 2, NULL, NULL), invalid);
  CHECK_INT(chosen[0], -7);
  CHECK_INT(chosen[1], -7);
  etkv_cache_free(cache);

  CHECK_INT(etkv_generation_read_prompts(NULL, &n, NULL), invalid);
  CHECK_INT(etkv_generation_next(NULL, &token, &end, 1, &n, NULL), invalid);
  CHECK_INT(etkv_generation_pause(NULL, NULL), invalid);
  CHECK_INT(etkv_generation_cancel(NULL, NULL), invalid);
  CHECK_INT(token, 2);
  CHECK_INT(end, -7);
  CHECK_INT(n, 7);
  CHECK_INT(etkv_generation_warm_up(NULL, NULL, NULL, NULL), invalid);
  etkv_generation_free(NULL);
}

static void struct_sizes(void) {
  setup s;
  const etkv_status invalid = ETKV_ERROR_INVALID_ARGUMENT;
  char words[64];

  /* The library tells the least that it takes: the size of the header's. */
  set_up(&s);
  snprintf(words, sizeof(words), "expected %zu", sizeof(s.config));
  s.config.struct_size = 0;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, invalid, words);
  s.config.struct_size = sizeof(s.config) - 1;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, invalid, words);
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, invalid, "config.struct_size is");

  set_up(&s);
  snprintf(words, sizeof(words), "expected %zu", sizeof(s.layers[0]));
  s.layers[0].struct_size = 0;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, invalid, words);
  s.layers[0].struct_size = sizeof(s.layers[0]) - 1;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, invalid, words);
  /* Sizes that no struct has are not followed to where they lead. */
  s.layers[0].struct_size = sizeof(s.layers[0]) + 1;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, invalid, "sizeof");
  s.layers[0].struct_size = (size_t)1 << 40;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, invalid, "sizeof");

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
  etkv_cache* cache = cache_of(session);

  struct {
    etkv_memory known;
    uint64_t later;
  } memory;
  memset(&memory, 0xff, sizeof(memory));
  memory.known.struct_size = sizeof(memory);
  memory.known.layers = NULL;
  memory.known.n_layers = 0;
  CHECK_INT(etkv_cache_memory(cache, &memory.known, NULL), ETKV_OK);
  CHECK(memory.known.struct_size == sizeof(memory));
  CHECK_INT(memory.known.allocated, 0);
  CHECK_INT(memory.known.used, 0);
  CHECK_INT(
      memory.known.at_capacity,
      (uint64_t)LAYERS * CAPACITY * HEADS * (K_DIM + V_DIM) * 2);
  CHECK(memory.later == UINT64_MAX);

  snprintf(words, sizeof(words), "expected %zu", sizeof(etkv_memory));
  etkv_memory small = {sizeof(small) - 1, 7, 8, 9, NULL, 0, 0};
  CHECK_REFUSED(etkv_cache_memory(cache, &small, error), invalid, words);
  small.struct_size = 0;
  CHECK_REFUSED(etkv_cache_memory(cache, &small, error), invalid, words);
  CHECK(small.allocated == 7 && small.used == 8 && small.at_capacity == 9);
  etkv_cache_free(cache);
  etkv_session_free(session);

  snprintf(words, sizeof(words), "expected %zu", sizeof(etkv_memory_budget));
  etkv_memory_budget budget = {sizeof(budget) - 1, 7, 8, 9, 10};
  CHECK_REFUSED(etkv_memory_budget_read(&budget, error), invalid, words);
  CHECK_REFUSED(
      etkv_memory_budget_read(NULL, error), invalid, "budget is NULL");
  CHECK(budget.limit == 7 && budget.n_caches == 10);
  budget.struct_size = sizeof(budget);
  CHECK_INT(etkv_memory_budget_set(1 << 20, NULL), ETKV_OK);
  CHECK_INT(etkv_memory_budget_read(&budget, NULL), ETKV_OK);
  CHECK(budget.limit == 1 << 20 && budget.held <= budget.peak);
  CHECK_INT(etkv_memory_budget_set(0, NULL), ETKV_OK);
  CHECK_INT(etkv_memory_budget_read(&budget, NULL), ETKV_OK);
  CHECK(budget.limit == 0);

  snprintf(words, sizeof(words), "expected %zu", sizeof(etkv_mlx_memory));
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
/* What the memory callback is called with, and what it may free. */
typedef struct {
  int calls;
  uint64_t bytes;
  etkv_session* spare;
  const etkv_cache* asking;
  etkv_status called;
  etkv_status set;
} asked;

static uint64_t free_spare(uint64_t bytes, void* user) {
  asked* into = user;
  ++into->calls;
  into->bytes = bytes;
  /* The cache that asks is locked, and that is no deadlock. */
  etkv_memory memory = {sizeof(memory), 0, 0, 0, NULL, 0, 0};
  if (into->asking != NULL) {
    into->called = etkv_cache_memory(into->asking, &memory, NULL);
  }
  into->set = etkv_memory_budget_set_callback(NULL, NULL, NULL);
  etkv_session_free(into->spare);
  into->spare = NULL;
  return bytes;
}

static void memory_callbacks(void) {
  setup s;
  set_up(&s);
  s.config.growth = ETKV_GROWTH_UPFRONT;
  etkv_memory_budget budget = {sizeof(budget), 0, 0, 0, 0};
  asked into = {0, 0, NULL, NULL, ETKV_OK, ETKV_OK};
  CHECK_INT(etkv_memory_budget_set_callback(free_spare, &into, NULL), ETKV_OK);
  into.spare = new_session(&s.config);
  CHECK_INT(etkv_memory_budget_read(&budget, NULL), ETKV_OK);
  const uint64_t one = budget.held;
  CHECK(one > 0);
  CHECK_INT(etkv_memory_budget_set(one + 1, NULL), ETKV_OK);
  /* It frees what another one needs. */
  etkv_session* session = new_session(&s.config);
  CHECK_INT(into.calls, 1);
  CHECK_INT(into.bytes, one - 1);
  CHECK_INT(into.set, ETKV_ERROR_STEP);
  /* It cannot: the cache that asks is the only one. */
  etkv_cache* cache = cache_of(session);
  into.asking = cache;
  into.calls = 0;
  CHECK_REFUSED(
      etkv_cache_convert(cache, "f32", "f16", error),
      ETKV_ERROR_BACKEND,
      "the memory budget is");
  CHECK(into.calls > 0);
  CHECK_INT(into.called, ETKV_ERROR_STEP);
  into.asking = NULL;
  into.calls = 0;

  char* json = NULL;
  CHECK_INT(etkv_process_report(&json, NULL), ETKV_OK);
  CHECK_HAS(json, "{\"memory\":{\"limit\":");
  CHECK_HAS(json, "\"free\":1,");
  CHECK_HAS(json, "\"kind\":\"contiguous\",\"name\":null,\"keys\":[\"");
  CHECK_HAS(json, etkv_session_key(session));
  etkv_string_free(json);
  CHECK_REFUSED(
      etkv_process_report(NULL, error),
      ETKV_ERROR_INVALID_ARGUMENT,
      "json is NULL");

  CHECK_INT(etkv_memory_budget_set_callback(NULL, NULL, NULL), ETKV_OK);
  CHECK(etkv_cache_convert(cache, "f32", "f16", NULL) == ETKV_ERROR_BACKEND);
  CHECK_INT(into.calls, 0);
  CHECK_INT(etkv_memory_budget_set(0, NULL), ETKV_OK);
  etkv_cache_free(cache);
  etkv_session_free(session);
}

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
  CHECK_FIELD(config.max_step_tokens, -2, invalid, "max_step_tokens is -2");
  CHECK_FIELD(config.growth, 4, invalid, "growth is 4");
  CHECK_FIELD(config.growth, -1, invalid, "growth is -1");
  CHECK_FIELD(
      config.quantized_kv_start, -4, invalid, "quantized_kv_start is -4");
  CHECK_FIELD(config.reserved, 9, invalid, "config.reserved is 9");
  CHECK_FIELD(
      config.k_format, "f24", invalid, "k_format: unknown storage format");
  CHECK_FIELD(config.v_format, "affine7", invalid, "v_format: unknown storage");
  CHECK_FIELD(config.v_format, "", invalid, "unknown storage format ``");
  CHECK_FIELD(config.k_format, "F16", invalid, "`F16`");
  CHECK_FIELD(config.k_format, "\xff", invalid, "k_format is not UTF-8");
  CHECK_FIELD(
      config.float_format, "f8", invalid, "float_format: unknown storage");
  /* Rows of 8 elements are no whole groups of 64. */
  CHECK_FIELD(config.k_format, "affine4g64", invalid, "layer 0: keys");
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
  CHECK_FIELD(layers[1].window, -1, invalid, "layer 1: window is -1");
  CHECK_FIELD(layers[1].sinks, 2, invalid, "layer 1: sinks is 2");
  CHECK_FIELD(layers[1].dtype, -7, invalid, "layer 1: dtype is -7");
  CHECK_FIELD(layers[1].dtype, 4, invalid, "dtypes are 0 to 3");
#undef CHECK_FIELD

  /* Fields that do not go together. */
  set_up(&s);
  s.layers[1].window = 4;
  s.layers[1].sinks = -1;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, invalid, "sinks is -1");
  set_up(&s);
  s.config.growth = ETKV_GROWTH_EXACT;
  s.config.min_chunk = 8;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, invalid, "min_chunk is 8");
  set_up(&s);
  s.config.growth = ETKV_GROWTH_STEP;
  s.config.min_chunk = -6;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, invalid, "growth step is -6");
  set_up(&s);
  s.config.quantized_kv_start = 4;
  s.config.float_format = "row-int4";
  CHECK_NO_SESSION(
      BACKEND,
      KIND,
      &s.config,
      invalid,
      "float_format f32, f16 or bf16, got row-int4");

  /* Zero means the default. */
  set_up(&s);
  s.layers[0].v_head_dim = 0;
  s.layers[1].v_head_dim = 0;
  s.config.k_format = "f32";
  etkv_session* session = new_session(&s.config);
  etkv_cache* cache = cache_of(session);
  etkv_memory memory = {sizeof(memory), 1, 1, 1, NULL, 0, 0};
  CHECK_INT(etkv_cache_memory(cache, &memory, NULL), ETKV_OK);
  CHECK_INT(
      memory.at_capacity,
      (uint64_t)LAYERS * CAPACITY * HEADS * (K_DIM * 4 + K_DIM * 2));
  etkv_cache_free(cache);
  etkv_session_free(session);
}

/* What a config will take is known before, and is what it takes. */
static void estimates(void) {
  setup s;
  set_up(&s);
  s.config.k_format = "row-int4";
  s.config.growth = ETKV_GROWTH_UPFRONT;
  s.layers[1].window = 2;
  s.layers[1].sinks = 1;
  s.config.max_step_tokens = 1;

  etkv_layer_memory layers[LAYERS];
  memset(layers, 0, sizeof(layers));
  layers[0].struct_size = sizeof(layers[0]);
  etkv_memory memory = {sizeof(memory), 0, 0, 0, layers, LAYERS, 0};
  CHECK_INT(
      etkv_cache_config_estimate(&s.config, CAPACITY, &memory, NULL), ETKV_OK);
  /* Half a byte an element and two for the scale; two bytes an element. */
  const uint64_t k_row = K_DIM / 2 + 2;
  const uint64_t v_row = V_DIM * 2;
  CHECK_INT(layers[0].k_allocated, CAPACITY * HEADS * k_row);
  CHECK_INT(layers[0].v_allocated, CAPACITY * HEADS * v_row);
  CHECK_INT(layers[0].k_used, CAPACITY * HEADS * k_row);
  /* A sink and the window. */
  CHECK_INT(layers[1].v_used, 3 * HEADS * v_row);
  CHECK(layers[1].k_allocated < layers[0].k_allocated);
  CHECK_INT(layers[1].struct_size, sizeof(layers[1]));
  CHECK_INT(
      memory.allocated,
      layers[0].k_allocated + layers[0].v_allocated + layers[1].k_allocated +
          layers[1].v_allocated);

  /* Sequences apart from each other may need a slot for every position. */
  etkv_memory shared = {sizeof(shared), 0, 0, 0, NULL, 0, 0};
  CHECK_INT(
      etkv_cache_config_estimate_shared(&s.config, 0, &shared, NULL), ETKV_OK);
  CHECK_INT(shared.used, 0);
  CHECK_INT(
      shared.allocated, (uint64_t)LAYERS * CAPACITY * HEADS * (k_row + v_row));
  static const char* const kinds[] = {"seq", "tree"};
  for (int i = 0; i < 2; ++i) {
    etkv_session* several = new_session_of(kinds[i], &s.config);
    etkv_cache* of_several = cache_of(several);
    etkv_memory found = {sizeof(found), 0, 0, 0, NULL, 0, 0};
    CHECK_INT(etkv_cache_memory(of_several, &found, NULL), ETKV_OK);
    CHECK_INT(found.allocated, shared.allocated);
    CHECK_INT(found.at_capacity, shared.at_capacity);
    etkv_cache_free(of_several);
    etkv_session_free(several);
  }

  etkv_session* session = new_session(&s.config);
  etkv_cache* cache = cache_of(session);
  etkv_layer_memory made[LAYERS];
  memset(made, 0, sizeof(made));
  made[0].struct_size = sizeof(made[0]);
  etkv_memory now = {sizeof(now), 0, 0, 0, made, LAYERS, 0};
  CHECK_INT(etkv_cache_memory(cache, &now, NULL), ETKV_OK);
  CHECK_INT(now.allocated, memory.allocated);
  CHECK_INT(now.at_capacity, memory.at_capacity);
  CHECK_INT(now.used, 0);
  for (int i = 0; i < LAYERS; ++i) {
    CHECK_INT(made[i].k_allocated, layers[i].k_allocated);
    CHECK_INT(made[i].v_allocated, layers[i].v_allocated);
    CHECK_INT(made[i].k_used, 0);
  }

  /* Room for another number of layers, or of another size. */
  const etkv_status invalid = ETKV_ERROR_INVALID_ARGUMENT;
  now.n_layers = LAYERS + 1;
  CHECK_REFUSED(
      etkv_cache_memory(cache, &now, error), invalid, "n_layers is 3");
  now.n_layers = 0;
  CHECK_REFUSED(etkv_cache_memory(cache, &now, error), invalid, "room for 0");
  now.layers = NULL;
  now.n_layers = LAYERS;
  CHECK_REFUSED(
      etkv_cache_memory(cache, &now, error), invalid, "layers is NULL");
  now.layers = made;
  made[0].struct_size = sizeof(made[0]) - 1;
  CHECK_REFUSED(
      etkv_cache_memory(cache, &now, error), invalid, "layers.struct_size is");
  etkv_cache_free(cache);
  etkv_session_free(session);

  CHECK_REFUSED(
      etkv_cache_config_estimate(&s.config, -1, &memory, error),
      invalid,
      "length is -1");
  CHECK_REFUSED(
      etkv_cache_config_estimate(&s.config, CAPACITY + 1, &memory, error),
      invalid,
      "length is 11");
  CHECK_REFUSED(
      etkv_cache_config_estimate_shared(
          &s.config, CAPACITY + 1, &memory, error),
      invalid,
      "length is 11");
  s.config.capacity = 0;
  CHECK_REFUSED(
      etkv_cache_config_estimate(&s.config, 0, &memory, error),
      invalid,
      "capacity is 0");
  CHECK_REFUSED(
      etkv_cache_config_estimate_shared(&s.config, 0, &memory, error),
      invalid,
      "capacity is 0");
}

static void formats(void) {
  static const struct {
    const char* name;
    const char* found;
    uint64_t bytes;
  } known[] = {
      {"f32", "f32", 512},
      {"f16", "f16", 256},
      {"bf16", "bf16", 256},
      {"affine2g32", "affine2g32", 32 + 16},
      {"affine3", "affine3g32", 48 + 16},
      {"affine4g64", "affine4g64", 64 + 8},
      {"affine5g128", "affine5g128", 80 + 4},
      {"affine6g64", "affine6g64", 96 + 8},
      {"affine8", "affine8g32", 128 + 16},
      {"mxfp8", "mxfp8", 128 + 4},
      {"mxfp4", "mxfp4", 64 + 4},
      {"nvfp4", "nvfp4", 64 + 8},
      {"row-int4", "row-int4", 66},
      {"row-fp4", "row-fp4", 66},
  };
  setup s;
  set_up(&s);
  for (int i = 0; i < LAYERS; ++i) {
    s.layers[i].k_head_dim = 128;
    s.layers[i].v_head_dim = 128;
  }
  const char* k = NULL;
  const char* v = NULL;
  for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); ++i) {
    uint64_t bytes = 0;
    CHECK_INT(etkv_format_row_bytes(known[i].name, 128, &bytes, NULL), ETKV_OK);
    CHECK_INT(bytes, known[i].bytes);
    s.config.k_format = known[i].name;
    s.config.v_format = known[sizeof(known) / sizeof(known[0]) - 1 - i].name;
    etkv_session* session = new_session(&s.config);
    etkv_cache* cache = cache_of(session);
    CHECK_INT(etkv_cache_formats(cache, &k, &v, NULL), ETKV_OK);
    CHECK(strcmp(k, known[i].found) == 0);
    etkv_cache_free(cache);
    etkv_session_free(session);
  }
  /* Static: there after their cache. */
  CHECK(strcmp(k, "row-fp4") == 0 && strcmp(v, "f32") == 0);

  const etkv_status invalid = ETKV_ERROR_INVALID_ARGUMENT;
  uint64_t bytes = 7;
  CHECK_REFUSED(
      etkv_format_row_bytes("mxfp6", 128, &bytes, error), invalid, "`mxfp6`");
  CHECK_REFUSED(
      etkv_format_row_bytes("affine4g64", 96, &bytes, error),
      invalid,
      "head_dim 96");
  CHECK_REFUSED(
      etkv_format_row_bytes("f16", 0, &bytes, error), invalid, "head_dim is 0");
  CHECK_REFUSED(
      etkv_format_row_bytes("f16", -1, &bytes, error), invalid, "is -1");
  CHECK(bytes == 7);

  set_up(&s);
  s.config.quantized_kv_start = 5;
  s.config.k_format = "row-int4";
  s.config.float_format = "bf16";
  etkv_session* session = new_session(&s.config);
  etkv_cache* cache = cache_of(session);
  CHECK_INT(etkv_cache_formats(cache, &k, &v, NULL), ETKV_OK);
  CHECK(strcmp(k, "bf16") == 0 && strcmp(v, "bf16") == 0);
  CHECK_INT(etkv_cache_convert(cache, "f32", "f16", NULL), ETKV_OK);
  CHECK_INT(etkv_cache_formats(cache, &k, &v, NULL), ETKV_OK);
  CHECK(strcmp(k, "f32") == 0 && strcmp(v, "f16") == 0);
  CHECK_REFUSED(
      etkv_cache_convert(cache, "f32", "f1", error),
      invalid,
      "v_format: unknown");
  CHECK_REFUSED(
      etkv_cache_convert(cache, "affine4", "f32", error), invalid, "layer 0");
  CHECK_INT(etkv_cache_formats(cache, &k, &v, NULL), ETKV_OK);
  CHECK(strcmp(k, "f32") == 0 && strcmp(v, "f16") == 0);
  /* Clearing undoes it. */
  CHECK_INT(etkv_cache_clear(cache, false, NULL), ETKV_OK);
  CHECK_INT(etkv_cache_formats(cache, &k, &v, NULL), ETKV_OK);
  CHECK(strcmp(k, "bf16") == 0 && strcmp(v, "bf16") == 0);
  etkv_cache_free(cache);
  etkv_session_free(session);
}

typedef struct {
  int n;
  char last[64];
} visited;

static void visit(void* context, const char* backend_id, const char* kind) {
  visited* found = context;
  CHECK(strcmp(backend_id, BACKEND) == 0 || strcmp(backend_id, "cpu") == 0);
  /* In order, and so each once. */
  char place[sizeof(found->last)];
  snprintf(place, sizeof(place), "%s/%s", backend_id, kind);
  CHECK(found->n == 0 || strcmp(place, found->last) > 0);
  memcpy(found->last, place, sizeof(place));
  ++found->n;

  /* Without locks: a kind that is listed can be made. */
  setup s;
  set_up(&s);
  etkv_cache* cache = NULL;
  CHECK_INT(etkv_cache_new(backend_id, kind, &s.config, &cache, NULL), ETKV_OK);
  CHECK(strcmp(etkv_cache_kind(cache), kind) == 0);
  CHECK_INT(etkv_cache_n_layers(cache), LAYERS);
  /* One of its layers may have a window. */
  CHECK(etkv_cache_max_step_tokens(cache) >= 1);
  CHECK(etkv_cache_max_step_tokens(cache) <= CAPACITY);
  etkv_cache_free(cache);
}

static void kinds(void) {
  setup s;
  set_up(&s);
  CHECK_NO_SESSION(BACKEND, "tapestry", &s.config, ETKV_ERROR_KIND, "tapestry");
  /* And says which there are. */
  CHECK_NO_SESSION(BACKEND, "", &s.config, ETKV_ERROR_KIND, KIND);
  CHECK_NO_SESSION("NoBackend", KIND, &s.config, ETKV_ERROR_KIND, "NoBackend");
  CHECK_NO_SESSION("", KIND, &s.config, ETKV_ERROR_KIND, BACKEND);
  CHECK_NO_SESSION(
      BACKEND, "\xff\xfe", &s.config, ETKV_ERROR_INVALID_ARGUMENT, "UTF-8");
  CHECK_NO_SESSION(
      "\xc3", KIND, &s.config, ETKV_ERROR_INVALID_ARGUMENT, "UTF-8");

  visited found = {0, ""};
  etkv_kinds(visit, &found);
  CHECK_INT(found.n, 6);
  CHECK(strcmp(found.last, "cpu/tree") == 0);
}

static void an_empty_cache(void) {
  setup s;
  set_up(&s);
  etkv_session* session = new_session(&s.config);
  /* The config is copied. */
  memset(&s, 0xff, sizeof(s));
  etkv_cache* cache = cache_of(session);
  etkv_error* error = UNTOUCHED;

  CHECK_INT(etkv_cache_capacity(cache), CAPACITY);
  int32_t number = -1;
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
  number = -1;
  CHECK_INT(etkv_cache_rewindable_to(cache, &number, &error), ETKV_OK);
  CHECK_INT(number, 0);
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

/* What is in the files is in saving.cpp. */
static void files(void) {
  const etkv_status invalid = ETKV_ERROR_INVALID_ARGUMENT;
  const char* path = "abi-test.safetensors";
  const int64_t text[2] = {7, -1};
  setup s;
  set_up(&s);
  etkv_session* session = new_session(&s.config);
  etkv_cache* cache = cache_of(session);
  etkv_save_options options = {0};
  int64_t* tokens = UNTOUCHED;
  const int64_t* untouched_list = tokens;
  size_t n = 9;

  CHECK_INT(etkv_cache_save(cache, path, NULL, NULL), ETKV_OK);
  CHECK_INT(etkv_cache_load(cache, path, NULL, NULL, NULL, NULL), ETKV_OK);
  CHECK_INT(etkv_cache_load(cache, path, "", &tokens, &n, NULL), ETKV_OK);
  CHECK_INT(n, 0);
  etkv_tokens_free(tokens, n);
  options.struct_size = sizeof(options);
  options.fingerprint = "a model";
  options.tokens = text;
  options.n_tokens = 2;
  CHECK_INT(etkv_cache_save(cache, path, &options, NULL), ETKV_OK);
  CHECK_INT(
      etkv_cache_load(cache, path, "a model", &tokens, &n, NULL), ETKV_OK);
  REQUIRE(n == 2);
  CHECK(tokens[0] == 7 && tokens[1] == -1);
  etkv_tokens_free(tokens, n);
  etkv_tokens_free(NULL, 0);

  char* fingerprint = NULL;
  CHECK_INT(etkv_fingerprint(path, &fingerprint, NULL), ETKV_OK);
  CHECK(strncmp(fingerprint, "xxh3-", 5) == 0 && strlen(fingerprint) == 37);
  etkv_string_free(fingerprint);
  fingerprint = UNTOUCHED;
  CHECK_REFUSED(
      etkv_fingerprint("no/such/file", &fingerprint, error),
      ETKV_ERROR_FILE,
      "cannot read no/such/file");
  CHECK_REFUSED(etkv_fingerprint(path, NULL, error), invalid, "fingerprint");
  CHECK(fingerprint == UNTOUCHED);

  tokens = UNTOUCHED;
  CHECK_REFUSED(
      etkv_cache_load(cache, path, "another", &tokens, &n, error),
      ETKV_ERROR_FILE,
      "of the model `a model`, expected `another`");
  CHECK_REFUSED(
      etkv_cache_load(cache, path, NULL, &tokens, NULL, error),
      invalid,
      "n_tokens");
  CHECK_REFUSED(
      etkv_cache_load(cache, NULL, NULL, NULL, NULL, error), invalid, "path");
  CHECK_REFUSED(
      etkv_cache_load(cache, "", NULL, NULL, NULL, error), invalid, "path");
  CHECK_REFUSED(
      etkv_cache_load(NULL, path, NULL, NULL, NULL, error), invalid, "cache");
  CHECK_REFUSED(
      etkv_cache_save(NULL, path, NULL, error), invalid, "cache is NULL");
  CHECK_REFUSED(
      etkv_cache_save(cache, NULL, NULL, error), invalid, "path is NULL");
  CHECK_REFUSED(
      etkv_cache_save(cache, "no/such/folder", NULL, error),
      ETKV_ERROR_FILE,
      "no/such/folder");
  options.struct_size = 1;
  CHECK_REFUSED(
      etkv_cache_save(cache, path, &options, error), invalid, "struct_size");
  remove(path);
  CHECK_REFUSED(
      etkv_cache_load(cache, path, NULL, &tokens, &n, error),
      ETKV_ERROR_FILE,
      path);
  CHECK(tokens == untouched_list && n == 2);
  etkv_cache_free(cache);
  etkv_session_free(session);
}

/* What is in the files is in saving.cpp. */
static void files_of_sequences(void) {
  const etkv_status invalid = ETKV_ERROR_INVALID_ARGUMENT;
  const char* path = "no/such/folder/file";
  setup s;
  set_up(&s);
  etkv_session* session = new_session_of("seq", &s.config);
  etkv_seq_cache* cache = NULL;
  REQUIRE(etkv_session_seq(session, &cache, NULL) == ETKV_OK);
  int64_t* tokens = UNTOUCHED;
  const int64_t* untouched = tokens;
  size_t n = 9;
  CHECK_REFUSED(
      etkv_seq_cache_save(NULL, 0, path, NULL, error), invalid, "cache");
  CHECK_REFUSED(
      etkv_seq_cache_save(cache, 256, path, NULL, error), invalid, "256");
  CHECK_REFUSED(
      etkv_seq_cache_save(cache, 3, path, NULL, error), invalid, "sequence 3");
  CHECK_REFUSED(
      etkv_seq_cache_load(NULL, 0, path, NULL, NULL, NULL, error),
      invalid,
      "cache");
  CHECK_REFUSED(
      etkv_seq_cache_load(cache, 0, path, NULL, &tokens, NULL, error),
      invalid,
      "n_tokens");
  CHECK_REFUSED(
      etkv_seq_cache_load(cache, 0, path, NULL, &tokens, &n, error),
      ETKV_ERROR_FILE,
      path);
  CHECK(tokens == untouched && n == 9);
  etkv_seq_cache_free(cache);
  etkv_session_free(session);
}

/* What they hold is in saving.cpp. */
static void prefixes_and_their_caches(void) {
  const etkv_status invalid = ETKV_ERROR_INVALID_ARGUMENT;
  const int64_t text[2] = {7, -1};
  setup s;
  set_up(&s);
  etkv_session* session = new_session(&s.config);
  etkv_cache* cache = cache_of(session);
  etkv_save_options options = {0};
  options.struct_size = sizeof(options);
  options.fingerprint = "a model";
  options.tokens = text;

  etkv_prefix* prefix = UNTOUCHED;
  CHECK_REFUSED(
      etkv_cache_freeze(cache, &prefix, error), invalid, "the cache is empty");
  CHECK_REFUSED(etkv_cache_freeze(cache, NULL, error), invalid, "prefix");
  CHECK_REFUSED(etkv_cache_freeze(NULL, &prefix, error), invalid, "cache");
  CHECK(prefix == UNTOUCHED);
  CHECK_REFUSED(
      etkv_cache_attach(cache, NULL, 1, error), invalid, "prefix is NULL");
  CHECK_INT(etkv_prefix_length(NULL), -1);
  CHECK_INT(etkv_prefix_rewindable_to(NULL), -1);
  CHECK_INT(etkv_prefix_bytes(NULL), 0);
  etkv_prefix_free(NULL);

  etkv_prefix_cache* prefixes = UNTOUCHED;
  etkv_prefix_cache_options limits = {0};
  CHECK_REFUSED(
      etkv_prefix_cache_new(&limits, &prefixes, error),
      invalid,
      "options.struct_size");
  limits.struct_size = sizeof(limits);
  limits.max_bytes = 1 << 20;
  limits.store = (const etkv_prefix_store*)cache;
  CHECK_REFUSED(
      etkv_prefix_cache_new(&limits, &prefixes, error),
      invalid,
      "options.store is an etkv_cache");
  CHECK_REFUSED(
      etkv_prefix_cache_new(NULL, NULL, error), invalid, "prefixes is NULL");
  CHECK(prefixes == UNTOUCHED);
  limits.store = NULL;
  REQUIRE(etkv_prefix_cache_new(&limits, &prefixes, NULL) == ETKV_OK);

  size_t n = 9;
  bool kept = true;
  uint64_t freed = 9;
  etkv_prefix_pin* pin = UNTOUCHED;
  CHECK_REFUSED(
      etkv_prefix_cache_keep(prefixes, cache, &options, &kept, error),
      invalid,
      "the text has 0 tokens");
  options.n_tokens = 2;
  CHECK_REFUSED(
      etkv_prefix_cache_keep(prefixes, cache, &options, NULL, error),
      invalid,
      "holds 0 positions");
  CHECK_REFUSED(
      etkv_prefix_cache_pin(prefixes, cache, &options, &pin, error),
      invalid,
      "no prefix in memory");
  CHECK_REFUSED(
      etkv_prefix_cache_attach(prefixes, cache, NULL, &n, error),
      invalid,
      "options");
  CHECK_REFUSED(
      etkv_prefix_cache_find(NULL, cache, &options, &n, error),
      invalid,
      "prefixes is NULL");
  CHECK(kept && pin == UNTOUCHED && n == 9);
  CHECK_INT(
      etkv_prefix_cache_find(prefixes, cache, &options, &n, NULL), ETKV_OK);
  CHECK_INT(n, 0);
  n = 9;
  CHECK_INT(
      etkv_prefix_cache_attach(prefixes, cache, &options, &n, NULL), ETKV_OK);
  CHECK_INT(n, 0);
  bool waits = true;
  CHECK_REFUSED(
      etkv_prefix_cache_prefetch(NULL, cache, &options, &waits, error),
      invalid,
      "prefixes is NULL");
  CHECK(waits);
  /* There is no store to read from. */
  CHECK_INT(
      etkv_prefix_cache_prefetch(prefixes, cache, &options, &waits, NULL),
      ETKV_OK);
  CHECK(!waits);
  CHECK_INT(etkv_prefix_cache_reclaim(prefixes, 1, &freed, NULL), ETKV_OK);
  CHECK_INT(freed, 0);
  CHECK_INT(etkv_prefix_cache_reclaim(prefixes, 1, NULL, NULL), ETKV_OK);
  CHECK_INT(etkv_prefix_cache_clear(prefixes, NULL), ETKV_OK);

  etkv_prefix_statistics found = {0};
  CHECK_REFUSED(
      etkv_prefix_cache_read(prefixes, &found, error),
      invalid,
      "statistics.struct_size");
  found.struct_size = sizeof(found);
  CHECK_INT(etkv_prefix_cache_read(prefixes, &found, NULL), ETKV_OK);
  CHECK(found.n_prefixes == 0 && found.n_bytes == 0 && found.n_pinned == 0);
  CHECK(found.tokens_asked == 2 && found.tokens_in_memory == 0);

  etkv_prefix_pin_free(NULL);
  etkv_prefix_cache_free(prefixes);
  etkv_prefix_cache_free(NULL);
  CHECK_REFUSED(
      etkv_prefix_cache_read(prefixes, &found, error),
      invalid,
      "prefixes is no handle");

  /* A caller whose etkv_memory does not have `shared` yet. */
  etkv_memory memory = {0};
  memory.struct_size = offsetof(etkv_memory, shared);
  memory.shared = 9;
  CHECK_INT(etkv_cache_memory(cache, &memory, NULL), ETKV_OK);
  CHECK(memory.shared == 9 && memory.at_capacity > 0);
  memory.struct_size = sizeof(memory);
  CHECK_INT(etkv_cache_memory(cache, &memory, NULL), ETKV_OK);
  CHECK_INT(memory.shared, 0);
  etkv_cache_free(cache);
  etkv_session_free(session);
}

/* What is in the folder is in saving.cpp. */
static void prefix_stores(void) {
  const etkv_status invalid = ETKV_ERROR_INVALID_ARGUMENT;
  const int64_t text[2] = {7, -1};
  setup s;
  set_up(&s);
  etkv_session* session = new_session(&s.config);
  etkv_cache* cache = cache_of(session);
  etkv_save_options options = {0};
  options.struct_size = sizeof(options);
  options.fingerprint = "a model";
  options.tokens = text;
  etkv_prefix_store* store = UNTOUCHED;
  CHECK_REFUSED(
      etkv_prefix_store_open("", 1, &store, error), invalid, "folder is empty");
  CHECK_REFUSED(
      etkv_prefix_store_open(NULL, 1, &store, error), invalid, "folder");
  CHECK_REFUSED(
      etkv_prefix_store_open("abi-test-store", 1, NULL, error),
      invalid,
      "store");
  CHECK(store == UNTOUCHED);
  REQUIRE(
      etkv_prefix_store_open("abi-test-store", 1 << 20, &store, NULL) ==
      ETKV_OK);

  size_t n = 9;
  uint64_t bytes = 9;
  bool written = true;
  CHECK_INT(etkv_prefix_store_usage(store, &n, &bytes, NULL), ETKV_OK);
  CHECK(n == 0 && bytes == 0);
  /* An empty cache has the empty text, which is too short. */
  CHECK_INT(
      etkv_prefix_store_save(store, cache, &options, &written, NULL), ETKV_OK);
  CHECK(!written);
  CHECK_INT(
      etkv_prefix_store_save(store, cache, &options, NULL, NULL), ETKV_OK);
  options.n_tokens = 2;
  n = 9;
  CHECK_INT(etkv_prefix_store_load(store, cache, &options, &n, NULL), ETKV_OK);
  CHECK_INT(n, 0);
  n = 9;
  CHECK_INT(etkv_prefix_store_find(store, cache, &options, &n, NULL), ETKV_OK);
  CHECK_INT(n, 0);

  written = true;
  n = 9;
  CHECK_REFUSED(
      etkv_prefix_store_save(store, cache, &options, &written, error),
      invalid,
      "holds 0 positions, and the text has 2 tokens");
  CHECK_REFUSED(
      etkv_prefix_store_save(NULL, cache, &options, &written, error),
      invalid,
      "store is NULL");
  CHECK_REFUSED(
      etkv_prefix_store_save(store, NULL, &options, &written, error),
      invalid,
      "cache is NULL");
  CHECK_REFUSED(
      etkv_prefix_store_save(store, cache, NULL, &written, error),
      invalid,
      "options");
  CHECK_REFUSED(
      etkv_prefix_store_load(store, cache, &options, NULL, error),
      invalid,
      "n_loaded");
  CHECK_REFUSED(
      etkv_prefix_store_load(store, cache, NULL, &n, error),
      invalid,
      "options");
  CHECK_REFUSED(
      etkv_prefix_store_find(NULL, cache, &options, &n, error),
      invalid,
      "store is NULL");
  CHECK_REFUSED(
      etkv_prefix_store_usage(store, NULL, &bytes, error), invalid, "n_files");
  CHECK_REFUSED(
      etkv_prefix_store_usage(store, &n, NULL, error), invalid, "n_bytes");
  CHECK(written && n == 9);

  etkv_prefix_store_free(store);
  etkv_prefix_store_free(NULL);
  CHECK_REFUSED(
      etkv_prefix_store_usage(store, &n, &bytes, error),
      invalid,
      "store is no handle");
  CHECK(remove("abi-test-store") == 0);
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
  etkv_cache* one = cache_of(sessions[0]);
  etkv_cache* two = cache_of(sessions[0]);
  REQUIRE(one != NULL && two != NULL);
  CHECK(one != two);
  char first_key[64];
  snprintf(first_key, sizeof(first_key), "%s", etkv_session_key(sessions[0]));
  for (int i = 0; i < SESSIONS; ++i) {
    etkv_session_free(sessions[i]);
  }
  CHECK_INT(etkv_cache_capacity(one), CAPACITY);
  etkv_cache_free(one);
  CHECK_INT(etkv_cache_capacity(two), CAPACITY);
  etkv_cache_free(two);

  /* A key is not used twice, not even after its session. */
  etkv_session* later = new_session(&s.config);
  CHECK(strcmp(first_key, etkv_session_key(later)) != 0);
  etkv_session_free(later);
}

int main(void) {
  versions();
  status_names();
  errors();
  the_delegate();
  generations();
  struct_sizes();
  memory_callbacks();
  config_fields();
  estimates();
  formats();
  kinds();
  an_empty_cache();
  files();
  files_of_sequences();
  prefixes_and_their_caches();
  prefix_stores();
  keys_and_handles();
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
