/*
 * Configs of caches, from C: fields, formats and estimates of memory.
 */
#include "abi.h"

static const etkv_status INVALID = ETKV_ERROR_INVALID_ARGUMENT;

/*
 * Every field is read at its offset in the header: the message that refuses a
 * value names the field and the value.
 */
static void fields(void) {
  setup s;
#define CHECK_FIELD(field, value, words)                        \
  do {                                                          \
    set_up(&s);                                                 \
    s.field = (value);                                          \
    CHECK_NO_SESSION(BACKEND, KIND, &s.config, INVALID, words); \
  } while (0)

  CHECK_FIELD(config.capacity, 0, "capacity is 0, the minimum is 1");
  CHECK_FIELD(config.capacity, INT32_MIN, "capacity is -2147483648");
  CHECK_FIELD(config.min_chunk, -3, "min_chunk is -3");
  CHECK_FIELD(config.max_step_tokens, -2, "max_step_tokens is -2");
  CHECK_FIELD(config.growth, 4, "growth is 4");
  CHECK_FIELD(config.growth, -1, "growth is -1");
  CHECK_FIELD(config.quantized_kv_start, -4, "quantized_kv_start is -4");
  CHECK_FIELD(config.reserved, 9, "config.reserved is 9");
  CHECK_FIELD(config.k_format, "f24", "k_format: unknown storage format");
  CHECK_FIELD(config.v_format, "affine7", "v_format: unknown storage");
  CHECK_FIELD(config.v_format, "", "unknown storage format ``");
  CHECK_FIELD(config.k_format, "F16", "`F16`");
  CHECK_FIELD(config.k_format, "\xff", "k_format is not UTF-8");
  CHECK_FIELD(config.float_format, "f8", "float_format: unknown storage");
  /* A row of 8 elements is less than a group of 64. */
  CHECK_FIELD(config.k_format, "affine4g64", "layer 0: keys");
  CHECK_FIELD(config.layers, NULL, "layers is NULL");
  CHECK_FIELD(config.n_layers, 0, "at least 1 layer");
  /* Refused before the layers are read. */
  CHECK_FIELD(config.n_layers, SIZE_MAX, "n_layers is");
  CHECK_FIELD(config.n_layers, 1 << 20, "n_layers is 1048576");

  CHECK_FIELD(layers[1].n_kv_heads, 0, "layer 1: n_kv_heads is 0");
  CHECK_FIELD(layers[0].n_kv_heads, -5, "layer 0: n_kv_heads is -5");
  CHECK_FIELD(layers[1].k_head_dim, 0, "layer 1: k_head_dim is 0");
  CHECK_FIELD(layers[1].k_head_dim, -6, "layer 1: k_head_dim is -6");
  CHECK_FIELD(layers[1].v_head_dim, -8, "layer 1: v_head_dim is -8");
  CHECK_FIELD(layers[1].window, -1, "layer 1: window is -1");
  CHECK_FIELD(layers[1].sinks, 2, "layer 1: sinks is 2");
  CHECK_FIELD(layers[1].dtype, -7, "layer 1: dtype is -7");
  CHECK_FIELD(layers[1].dtype, 4, "expected 0 to 3");

  /* `struct_size` is the distance between layers. */
  CHECK_FIELD(layers[0].struct_size, 31, "struct_size is 31, expected 40");
  CHECK_FIELD(layers[0].struct_size, (size_t)1 << 40, "sizeof");
  CHECK_FIELD(layers[1].struct_size, 48, "layer 1: struct_size");
  CHECK_FIELD(layers[1].struct_size, 0, "layer 1: struct_size");
#undef CHECK_FIELD

  /* Contradictory fields. */
  set_up(&s);
  s.layers[1].window = 4;
  s.layers[1].sinks = -1;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, INVALID, "sinks is -1");
  set_up(&s);
  s.config.growth = ETKV_GROWTH_EXACT;
  s.config.min_chunk = 8;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, INVALID, "min_chunk is 8");
  s.config.growth = ETKV_GROWTH_STEP;
  s.config.min_chunk = -6;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, INVALID, "growth step is -6");
  set_up(&s);
  s.config.quantized_kv_start = 4;
  s.config.float_format = "row-int4";
  CHECK_NO_SESSION(
      BACKEND,
      KIND,
      &s.config,
      INVALID,
      "float_format f32, f16 or bf16, got row-int4");
}

/*
 * Structs of a later header are longer. Structs of an earlier header have no
 * `shared` and no recurrent layers.
 */
static void other_versions(void) {
  struct {
    etkv_layer_config known;
    uint64_t later[2];
  } layers[LAYERS];
  setup s;
  set_up(&s);
  memset(layers, 0xff, sizeof(layers));
  for (int i = 0; i < LAYERS; ++i) {
    layers[i].known = s.layers[i];
    layers[i].known.struct_size = sizeof(layers[i]);
    /* Zero means the default: as wide as keys. */
    layers[i].known.v_head_dim = 0;
  }
  s.config.layers = &layers[0].known;
  s.config.k_format = "f32";
  etkv_session* session = new_session(&s.config);
  etkv_cache* cache = cache_of(session);
  etkv_memory memory = {0};
  memory.struct_size = offsetof(etkv_memory, shared);
  memory.shared = 9;
  CHECK_OK(etkv_cache_memory(cache, &memory, NULL));
  CHECK_INT(memory.struct_size, offsetof(etkv_memory, shared));
  CHECK_INT(memory.shared, 9);
  CHECK_INT(memory.allocated, 0);
  CHECK_INT(
      memory.at_capacity,
      (uint64_t)LAYERS * CAPACITY * HEADS * (K_DIM * 4 + K_DIM * 2));
  memory.struct_size = sizeof(memory);
  CHECK_OK(etkv_cache_memory(cache, &memory, NULL));
  CHECK_INT(memory.shared, 0);
  etkv_cache_free(cache);
  etkv_session_free(session);

  /* In an earlier header the struct ends before `values_in_keys`. */
  enum { EARLIER = offsetof(etkv_layer_config, values_in_keys) };
  uint64_t earlier[LAYERS * EARLIER / 8];
  for (int i = 0; i < LAYERS; ++i) {
    s.layers[i].struct_size = EARLIER;
    memcpy((char*)earlier + i * EARLIER, &s.layers[i], EARLIER);
  }
  s.config.layers = (const etkv_layer_config*)earlier;

  /* Fields beyond `struct_size` are not read. */
  s.config.struct_size = offsetof(etkv_cache_config, recurrent_layers);
  s.config.n_recurrent_layers = SIZE_MAX;
  s.config.anchors = s.config.checkpoints = -9;
  session = new_session(&s.config);
  cache = cache_of(session);
  CHECK_INT(etkv_cache_n_layers(cache), LAYERS);
  CHECK_INT(etkv_cache_n_recurrent_layers(cache), 0);
  CHECK_OK(etkv_cache_memory(cache, &memory, NULL));
  CHECK_INT(
      memory.at_capacity,
      (uint64_t)LAYERS * CAPACITY * HEADS * (K_DIM * 4 + V_DIM * 2));
  etkv_cache_free(cache);
  etkv_session_free(session);
}

/* A layer with chunks keeps only a few positions more than one chunk. */
static void chunks(void) {
  setup s;
  set_up(&s);
  s.layers[1].chunk = -3;
  CHECK_NO_SESSION(
      BACKEND,
      KIND,
      &s.config,
      INVALID,
      "layer 1: chunk is -3, the minimum is 1");
  s.layers[1].chunk = 4;
  s.layers[1].window = 4;
  CHECK_NO_SESSION(BACKEND, KIND, &s.config, INVALID, "layer 1: chunk is 4");
  s.layers[1].window = 0;
  s.config.max_step_tokens = 1;
  s.config.k_format = "f32";
  s.config.v_format = "f16";
  etkv_memory memory = {.struct_size = sizeof(memory)};
  CHECK_OK(etkv_cache_config_estimate(&s.config, CAPACITY, &memory, NULL));
  const uint64_t full = (uint64_t)HEADS * (K_DIM * 4 + V_DIM * 2);
  CHECK(memory.at_capacity < 2 * CAPACITY * full);
  CHECK(memory.at_capacity >= (CAPACITY + 4) * full);
}

/* Values in keys take no bytes. */
static void values_in_keys(void) {
  setup s;
  set_up(&s);
  s.layers[1].values_in_keys = 2;
  CHECK_NO_SESSION(
      BACKEND, KIND, &s.config, INVALID, "layer 1: values_in_keys is 2");
  s.layers[1].values_in_keys = 1;
  s.layers[1].v_head_dim = K_DIM + 1;
  CHECK_NO_SESSION(
      BACKEND, KIND, &s.config, INVALID, "at most the 8 elements of a key");
  s.layers[1].v_head_dim = V_DIM;
  s.config.k_format = "f32";
  s.config.v_format = "f16";
  etkv_memory memory = {.struct_size = sizeof(memory)};
  CHECK_OK(etkv_cache_config_estimate(&s.config, CAPACITY, &memory, NULL));
  CHECK_INT(
      memory.at_capacity, (uint64_t)CAPACITY * HEADS * (K_DIM * 8 + V_DIM * 2));
  for (int i = 0; i < LAYERS; ++i) {
    s.layers[i].values_in_keys = 1;
  }
  CHECK_NO_SESSION(
      BACKEND, KIND, &s.config, INVALID, "v_format is f16, but the values of");
  s.config.v_format = NULL;
  CHECK_OK(etkv_cache_config_estimate(&s.config, CAPACITY, &memory, NULL));
  CHECK_INT(
      memory.at_capacity, (uint64_t)LAYERS * CAPACITY * HEADS * K_DIM * 4);
}

/*
 * The values that an estimate writes for layers, and the arguments that it
 * refuses. metadata.cpp compares estimates with the memory of caches.
 */
static void estimates(void) {
  setup s;
  set_up(&s);
  s.config.growth = ETKV_GROWTH_UPFRONT;
  s.layers[1].window = 2;
  s.layers[1].sinks = 1;
  s.config.max_step_tokens = 1;
  etkv_layer_memory layers[LAYERS] = {{0}};
  layers[0].struct_size = sizeof(layers[0]);
  etkv_memory memory = {
      .struct_size = sizeof(memory), .layers = layers, .n_layers = LAYERS};
  CHECK_OK(etkv_cache_config_estimate(&s.config, CAPACITY, &memory, NULL));
  const uint64_t k_row = HEADS * K_DIM * 2;
  const uint64_t v_row = HEADS * V_DIM * 2;
  CHECK_INT(layers[0].k_allocated, CAPACITY * k_row);
  CHECK_INT(layers[0].v_used, CAPACITY * v_row);
  /* A sink and the window. */
  CHECK_INT(layers[1].k_used, 3 * k_row);
  CHECK_INT(layers[1].struct_size, sizeof(layers[1]));

  /* Separate sequences may need a slot for every position. */
  etkv_memory shared = {.struct_size = sizeof(shared), .used = 1};
  CHECK_OK(etkv_cache_config_estimate_shared(&s.config, 0, &shared, NULL));
  CHECK_INT(shared.used, 0);
  CHECK_INT(shared.allocated, LAYERS * CAPACITY * (k_row + v_row));
  static const char* const kinds[] = {KIND, "seq", "tree"};
  etkv_cache* cache = NULL;
  for (int i = 0; i < 3; ++i) {
    const etkv_memory* expected = i == 0 ? &memory : &shared;
    etkv_memory found = {.struct_size = sizeof(found), .used = 1};
    etkv_cache_free(cache);
    CHECK_OK(etkv_cache_new(BACKEND, kinds[i], &s.config, &cache, NULL));
    CHECK_OK(etkv_cache_memory(cache, &found, NULL));
    CHECK_INT(found.allocated, expected->allocated);
    CHECK_INT(found.at_capacity, expected->at_capacity);
    CHECK_INT(found.used, 0);
  }

  /* The wrong number of layers, or the wrong size. */
#define CHECK_ROOM(field, value, words)                                     \
  memory = (etkv_memory){                                                   \
      .struct_size = sizeof(memory), .layers = layers, .n_layers = LAYERS}; \
  memory.field = (value);                                                   \
  CHECK_REFUSED(etkv_cache_memory(cache, &memory, error), INVALID, words)
  CHECK_ROOM(n_layers, LAYERS + 1, "layers has room for 3, there are 2");
  CHECK_ROOM(n_layers, 0, "room for 0");
  CHECK_ROOM(layers, NULL, "layers is NULL");
  CHECK_ROOM(layers->struct_size, 39, "layers.struct_size is");
#undef CHECK_ROOM
  etkv_cache_free(cache);

#define CHECK_ESTIMATES(length, words)                                      \
  CHECK_REFUSED(                                                            \
      etkv_cache_config_estimate(&s.config, length, &shared, error),        \
      INVALID,                                                              \
      words);                                                               \
  CHECK_REFUSED(                                                            \
      etkv_cache_config_estimate_shared(&s.config, length, &shared, error), \
      INVALID,                                                              \
      words)
  CHECK_ESTIMATES(-1, "length is -1");
  CHECK_ESTIMATES(CAPACITY + 1, "length is 11");
  s.config.capacity = 0;
  CHECK_ESTIMATES(0, "capacity is 0");
#undef CHECK_ESTIMATES
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
  const char* k = NULL;
  const char* v = NULL;
  etkv_cache* cache = NULL;
  uint64_t bytes = 0;
#define CHECK_FORMATS(k_format, v_format)            \
  CHECK_OK(etkv_cache_formats(cache, &k, &v, NULL)); \
  CHECK(strcmp(k, k_format) == 0 && strcmp(v, v_format) == 0)
  for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); ++i) {
    CHECK_OK(etkv_format_row_bytes(known[i].name, 128, &bytes, NULL));
    CHECK_INT(bytes, known[i].bytes);
    set_up(&s);
    s.layers[0].k_head_dim = s.layers[1].k_head_dim = 128;
    s.config.k_format = known[i].name;
    s.config.v_format = "f32";
    CHECK_OK(etkv_cache_new(BACKEND, KIND, &s.config, &cache, NULL));
    CHECK_FORMATS(known[i].found, "f32");
    etkv_cache_free(cache);
    /* The string is static: it is valid after the cache is freed. */
    CHECK(strcmp(k, known[i].found) == 0);
  }
#define CHECK_BYTES(name, head_dim, words) \
  CHECK_REFUSED(                           \
      etkv_format_row_bytes(name, head_dim, &bytes, error), INVALID, words)
  CHECK_BYTES("mxfp6", 128, "`mxfp6`");
  CHECK_BYTES("affine4g64", 96, "head_dim 96");
  CHECK_BYTES("f16", 0, "head_dim is 0");
#undef CHECK_BYTES
  CHECK_INT(bytes, 66);

  set_up(&s);
  s.config.quantized_kv_start = 5;
  s.config.k_format = "row-int4";
  s.config.float_format = "bf16";
  CHECK_OK(etkv_cache_new(BACKEND, KIND, &s.config, &cache, NULL));
  CHECK_FORMATS("bf16", "bf16");
  CHECK_OK(etkv_cache_convert(cache, "f32", "f16", NULL));
  CHECK_FORMATS("f32", "f16");
  CHECK_REFUSED(
      etkv_cache_convert(cache, "f32", "f1", error), INVALID, "v_format: ");
  CHECK_REFUSED(
      etkv_cache_convert(cache, "affine4", "f32", error), INVALID, "layer 0");
  CHECK_FORMATS("f32", "f16");
  /* Clearing undoes the conversion. */
  CHECK_OK(etkv_cache_clear(cache, false, NULL));
  CHECK_FORMATS("bf16", "bf16");
#undef CHECK_FORMATS
  etkv_cache_free(cache);
}

int main(void) {
  fields();
  other_versions();
  chunks();
  values_in_keys();
  estimates();
  formats();
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
