/*
 * Caches with recurrent layers, from C: configs, estimates of memory, and
 * checkpoints.
 */
#include "abi.h"

static const etkv_status INVALID = ETKV_ERROR_INVALID_ARGUMENT;

enum {
  RECURRENT = 2,
  CHANNELS = 12,
  WIDTH = 4,
  K_HEADS = 2,
  VALUE_HEADS = 4,
  KEY_DIM = 8,
  VALUE_DIM = 6,
  BLOCK = 64,
  LONG = 4 * BLOCK,
};

static const char* const BACKENDS[] = {"MLXBackend", "cpu"};
static const char* const KINDS[] = {"contiguous", "seq", "tree"};

typedef struct {
  setup attention;
  etkv_recurrent_layer_config layers[RECURRENT];
} recurrent_setup;

/* A valid config of two attention layers, a convolution and a recurrence. */
static etkv_cache_config* set_up_recurrent(recurrent_setup* s) {
  set_up(&s->attention);
  memset(s->layers, 0, sizeof(s->layers));
  s->layers[0].struct_size = s->layers[1].struct_size = sizeof(s->layers[0]);
  s->layers[0].kind = ETKV_RECURRENT_CONVOLUTION;
  s->layers[0].channels = CHANNELS;
  s->layers[0].width = WIDTH;
  s->layers[1].kind = ETKV_RECURRENT_RECURRENCE;
  s->layers[1].k_heads = K_HEADS;
  s->layers[1].heads = VALUE_HEADS;
  s->layers[1].k_dim = KEY_DIM;
  s->layers[1].v_dim = VALUE_DIM;
  s->attention.config.recurrent_layers = s->layers;
  s->attention.config.n_recurrent_layers = RECURRENT;
  s->attention.config.capacity = LONG;
  return &s->attention.config;
}

static void fields(void) {
  recurrent_setup s;
#define CHECK_FIELD(field, value, words)                     \
  do {                                                       \
    etkv_cache_config* config = set_up_recurrent(&s);        \
    s.field = (value);                                       \
    CHECK_NO_SESSION(BACKEND, KIND, config, INVALID, words); \
  } while (0)
#define CHECK_CONFIG(field, value, words) \
  CHECK_FIELD(attention.config.field, value, words)
  CHECK_CONFIG(anchors, -1, "anchors is -1, the minimum is 1");
  CHECK_CONFIG(anchors, 65, "anchors is 65, the maximum is 64");
  CHECK_CONFIG(
      checkpoints, -2, "checkpoints is -2, the minimum is -1, for none");
  CHECK_CONFIG(checkpoints, 257, "checkpoints is 257, the maximum is 256");
  CHECK_CONFIG(recurrent_layers, NULL, "recurrent_layers is NULL");
  CHECK_CONFIG(n_recurrent_layers, SIZE_MAX, "n_recurrent_layers is");
  CHECK_CONFIG(struct_size, 64, "config.struct_size is 64");

  CHECK_FIELD(layers[0].kind, 0, "recurrent layer 0: kind is 0");
  CHECK_FIELD(layers[1].kind, 3, "recurrent layer 1: kind is 3");
  CHECK_FIELD(layers[0].channels, 0, "recurrent layer 0: channels is 0");
  CHECK_FIELD(layers[0].width, 0, "width is 0, the minimum is 1");
  CHECK_FIELD(layers[0].width, 65, "width is 65, the maximum is 64");
  CHECK_FIELD(layers[0].k_heads, 1, "k_heads is 1, expected 0");
  CHECK_FIELD(layers[0].channel_decay, 1, "expected 0 for a convolution");
  CHECK_FIELD(layers[1].channels, 7, "channels is 7, expected 0");
  CHECK_FIELD(layers[1].width, 2, "expected 0 for a recurrence");
  CHECK_FIELD(layers[1].k_heads, 0, "recurrent layer 1: k_heads is 0");
  CHECK_FIELD(layers[1].k_heads, 3, "multiple of k_heads, got 4 and 3");
  CHECK_FIELD(layers[1].heads, -4, "recurrent layer 1: heads is -4");
  CHECK_FIELD(layers[1].k_dim, 0, "recurrent layer 1: k_dim is 0");
  CHECK_FIELD(layers[1].v_dim, INT32_MIN, "v_dim is -2147483648");
  CHECK_FIELD(layers[1].k_dim, INT32_MAX, "too large");
  CHECK_FIELD(layers[1].channel_decay, 2, "channel_decay is 2, expected 0 or");
  CHECK_FIELD(layers[0].struct_size, 32, "recurrent_layers.struct_size is 32");
  CHECK_FIELD(layers[1].struct_size, 48, "recurrent layer 1: struct_size");
#undef CHECK_CONFIG
#undef CHECK_FIELD
}

/* The bytes of a cache follow from its config. */
static void estimates(void) {
  recurrent_setup s;
  etkv_cache_config* config = set_up_recurrent(&s);
  config->growth = ETKV_GROWTH_EXACT;
  etkv_layer_memory layers[LAYERS] = {{0}};
  layers[0].struct_size = sizeof(layers[0]);
  etkv_recurrent_layer_memory recurrent[RECURRENT] = {{0}};
  recurrent[0].struct_size = sizeof(recurrent[0]);
  etkv_memory memory = {
      .struct_size = sizeof(memory),
      .layers = layers,
      .n_layers = LAYERS,
      .recurrent_layers = recurrent,
      .n_recurrent_layers = RECURRENT};
  CHECK_OK(etkv_cache_config_estimate(config, 10, &memory, NULL));
  const uint64_t of_attention = 10 * HEADS * (K_DIM + V_DIM) * 2;
  /*
   * Rows are always float32. A row of the recurrence also has the decay of each
   * head.
   */
  const uint64_t column = CHANNELS * 4;
  const uint64_t row = (K_HEADS * KEY_DIM + VALUE_HEADS * (VALUE_DIM + 1)) * 4;
  CHECK_INT(layers[1].struct_size, sizeof(layers[1]));
  CHECK_INT(layers[0].k_used, 10 * HEADS * K_DIM * 2);
  CHECK_INT(recurrent[1].struct_size, sizeof(recurrent[1]));
  CHECK_INT(recurrent[0].rows_used, 10 * column);
  CHECK_INT(recurrent[1].rows_used, 10 * row);
  CHECK_INT(recurrent[0].anchors_allocated, 0);
  CHECK_INT(recurrent[1].anchors_used, 0);
  CHECK_INT(memory.used, LAYERS * of_attention + 10 * (column + row));

  /* Each anchor has one state. */
  const uint64_t state = VALUE_HEADS * KEY_DIM * VALUE_DIM * 4;
  CHECK_OK(etkv_cache_config_estimate(config, LONG, &memory, NULL));
  CHECK_INT(recurrent[1].anchors_used, 2 * state);
  config->anchors = 3;
  CHECK_OK(etkv_cache_config_estimate(config, LONG, &memory, NULL));
  CHECK_INT(recurrent[1].anchors_used, 3 * state);
  const uint64_t rows_of_three = recurrent[1].rows_used;
  config->anchors = 2;
  CHECK_OK(etkv_cache_config_estimate(config, LONG, &memory, NULL));
  CHECK_INT(rows_of_three - recurrent[1].rows_used, BLOCK * row);

  /* 32 checkpoints by default, each with one state. */
  config->capacity = 64 * BLOCK;
  etkv_memory shared = {.struct_size = sizeof(shared)};
  CHECK_OK(etkv_cache_config_estimate_shared(config, 0, &shared, NULL));
  const uint64_t by_default = shared.at_capacity;
  config->checkpoints = 31;
  CHECK_OK(etkv_cache_config_estimate_shared(config, 0, &shared, NULL));
  CHECK_INT(by_default - shared.at_capacity, state);
  config->checkpoints = ETKV_NO_CHECKPOINTS;
  CHECK_OK(etkv_cache_config_estimate_shared(config, 0, &shared, NULL));
  CHECK_INT(by_default - shared.at_capacity, 32 * state);

  /* A cache reports the estimated bytes. */
  config = set_up_recurrent(&s);
  config->growth = ETKV_GROWTH_UPFRONT;
  for (int backend = 0; backend < 2; ++backend) {
    for (int kind = 0; kind < 3; ++kind) {
      etkv_cache* cache = NULL;
      CHECK_OK(
          etkv_cache_new(BACKENDS[backend], KINDS[kind], config, &cache, NULL));
      REQUIRE(cache != NULL);
      CHECK_INT(etkv_cache_n_layers(cache), LAYERS);
      CHECK_INT(etkv_cache_n_recurrent_layers(cache), RECURRENT);
      memory.struct_size = sizeof(memory);
      CHECK_OK(etkv_cache_memory(cache, &memory, NULL));
      const uint64_t rows = recurrent[0].rows_allocated;
      const uint64_t anchors = recurrent[1].anchors_allocated;
      const uint64_t allocated = memory.allocated;
      const uint64_t at_capacity = memory.at_capacity;
      CHECK(rows > 0 && anchors > 0);
      CHECK_OK(
          (kind == 0
               ? etkv_cache_config_estimate
               : etkv_cache_config_estimate_shared)(config, 0, &memory, NULL));
      CHECK_INT(recurrent[0].rows_allocated, rows);
      CHECK_INT(recurrent[1].anchors_allocated, anchors);
      CHECK_INT(memory.allocated, allocated);
      CHECK_INT(memory.at_capacity, at_capacity);
      etkv_cache_free(cache);
    }
  }

  /* With a wrong number of layers nothing is written. */
  etkv_cache* cache = NULL;
  CHECK_OK(etkv_cache_new(BACKEND, KIND, config, &cache, NULL));
  layers[0].k_allocated = 77;
  memory.n_recurrent_layers = 3;
  CHECK_REFUSED(
      etkv_cache_memory(cache, &memory, error),
      INVALID,
      "memory.recurrent_layers has room for 3, there are 2");
  memory.n_recurrent_layers = 0;
  CHECK_REFUSED(
      etkv_cache_memory(cache, &memory, error),
      INVALID,
      "memory.recurrent_layers has room for 0, there are 2");
  memory.n_recurrent_layers = RECURRENT;
  recurrent[0].struct_size = 8;
  CHECK_REFUSED(
      etkv_cache_memory(cache, &memory, error),
      INVALID,
      "memory.recurrent_layers.struct_size is 8");
  CHECK_INT(layers[0].k_allocated, 77);
  /* A caller with the earlier struct gets the sums. */
  memory.struct_size = offsetof(etkv_memory, recurrent_layers);
  CHECK_OK(etkv_cache_memory(cache, &memory, NULL));
  CHECK_INT(layers[0].k_allocated, LONG * HEADS * K_DIM * 2);
  etkv_cache_free(cache);
}

/* A model whose layers are all recurrent. */
static void without_attention(void) {
  recurrent_setup s;
  etkv_cache_config* config = set_up_recurrent(&s);
  config->layers = NULL;
  config->n_layers = 0;
  etkv_cache* cache = NULL;
  for (int backend = 0; backend < 2; ++backend) {
    for (int kind = 0; kind < 3; ++kind) {
      etkv_cache_free(cache);
      CHECK_OK(
          etkv_cache_new(BACKENDS[backend], KINDS[kind], config, &cache, NULL));
      CHECK_INT(etkv_cache_n_layers(cache), 0);
      CHECK_INT(etkv_cache_n_recurrent_layers(cache), RECURRENT);
      CHECK_INT(etkv_cache_capacity(cache), LONG);
      etkv_memory memory = {.struct_size = sizeof(memory)};
      CHECK_OK(etkv_cache_memory(cache, &memory, NULL));
      CHECK_INT(memory.used, 0);
    }
  }
  etkv_cache_free(cache);
  config->n_recurrent_layers = 0;
  CHECK_NO_SESSION(BACKEND, KIND, config, INVALID, "at least 1 layer");
}

/* The positions of checkpoints that are marked before any token runs. */
static void checkpoints(void) {
  recurrent_setup s;
  etkv_cache_config* config = set_up_recurrent(&s);
  int32_t found = 9;
  etkv_cache* cache = NULL;
  for (int kind = 0; kind < 3; ++kind) {
    CHECK_OK(etkv_cache_new("cpu", KINDS[kind], config, &cache, NULL));
    CHECK_OK(etkv_cache_reachable(cache, 100, &found, NULL));
    CHECK_INT(found, 0);
    CHECK_OK(etkv_cache_mark(cache, 100, &found, NULL));
    CHECK_INT(found, BLOCK);
    CHECK_OK(etkv_cache_mark(cache, 2 * BLOCK, &found, NULL));
    CHECK_INT(found, 2 * BLOCK);
    CHECK_OK(etkv_cache_mark(cache, BLOCK - 1, &found, NULL));
    CHECK_INT(found, 0);
    /* No step has reached the marks. */
    CHECK_OK(etkv_cache_reachable(cache, INT32_MAX, &found, NULL));
    CHECK_INT(found, 0);
    found = 9;
    CHECK_REFUSED(
        etkv_cache_reachable(cache, -1, &found, error),
        ETKV_ERROR_POSITION,
        "position -1 is negative");
    CHECK_REFUSED(
        etkv_cache_mark(cache, INT32_MIN, &found, error),
        ETKV_ERROR_POSITION,
        "position -2147483648 is negative");
    CHECK_INT(found, 9);
    if (kind > 0) {
      etkv_seq_cache* sequences = NULL;
      CHECK_OK(etkv_cache_as_seq(cache, &sequences, NULL));
      CHECK_OK(etkv_seq_cache_mark_turn(sequences, 255, 200, NULL));
      CHECK_REFUSED(
          etkv_seq_cache_mark_turn(sequences, 256, 200, error), INVALID, "256");
      CHECK_OK(etkv_seq_cache_mark(sequences, 255, 70, &found, NULL));
      CHECK_INT(found, BLOCK);
      CHECK_OK(etkv_seq_cache_reachable(sequences, 255, 70, &found, NULL));
      CHECK_INT(found, 0);
      CHECK_REFUSED(
          etkv_seq_cache_mark(sequences, 256, 70, &found, error),
          INVALID,
          "256");
      CHECK_REFUSED(
          etkv_seq_cache_reachable(sequences, -1, 70, &found, error),
          INVALID,
          "-1");
      CHECK_REFUSED(
          etkv_seq_cache_mark(sequences, 3, -70, &found, error),
          ETKV_ERROR_POSITION,
          "position -70 is negative");
      CHECK_REFUSED(
          etkv_seq_cache_reachable(sequences, 3, -70, &found, error),
          ETKV_ERROR_POSITION,
          "position -70 is negative");
      etkv_seq_cache_free(sequences);
    }
    etkv_cache_free(cache);

    config->checkpoints = ETKV_NO_CHECKPOINTS;
    CHECK_OK(etkv_cache_new("cpu", KINDS[kind], config, &cache, NULL));
    CHECK_OK(etkv_cache_mark(cache, 100, &found, NULL));
    CHECK_INT(found, 0);
    etkv_cache_free(cache);
    config->checkpoints = 0;
  }

  /*
   * Without recurrent layers, checkpoints may be at any position. A contiguous
   * cache without windows keeps all rows, so it needs no checkpoints. With
   * windows it supports none.
   */
  config->n_recurrent_layers = 0;
  for (int kind = 0; kind < 3; ++kind) {
    CHECK_OK(etkv_cache_new(BACKEND, KINDS[kind], config, &cache, NULL));
    CHECK_OK(etkv_cache_mark(cache, 100, &found, NULL));
    CHECK_INT(found, 100);
    etkv_cache_free(cache);
  }
  s.attention.layers[1].window = 4;
  config->max_step_tokens = 8;
  CHECK_OK(etkv_cache_new(BACKEND, KIND, config, &cache, NULL));
  CHECK_REFUSED(
      etkv_cache_mark(cache, 100, &found, error),
      ETKV_ERROR_UNSUPPORTED,
      "use kind seq or tree");
  CHECK_OK(etkv_cache_reachable(cache, 100, &found, NULL));
  CHECK_INT(found, 0);
  etkv_cache_free(cache);
}

int main(void) {
  fields();
  estimates();
  without_attention();
  checkpoints();
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
