/* Creates, queries and frees a cache in C. */
#include <stdio.h>

#include <etkv/etkv.h>

static int failed(const char* what, etkv_error* error) {
  fprintf(stderr, "%s: %s\n", what, etkv_error_message(error));
  etkv_error_free(error);
  return 1;
}

int main(void) {
  etkv_error* error = NULL;
  etkv_session* session = NULL;
  etkv_layer_config layer = {.struct_size = sizeof(layer)};
  etkv_cache_config config = {.struct_size = sizeof(config)};
  layer.n_kv_heads = 2;
  layer.k_head_dim = 16;
  config.layers = &layer;
  config.n_layers = 1;
  config.capacity = 64;
  if (etkv_session_new("MLXBackend", "contiguous", &config, &session, &error) !=
      ETKV_OK) {
    return failed("etkv_session_new", error);
  }
  etkv_cache* cache = etkv_session_cache(session);
  bool fits = false;
  bool too_many = true;
  if (etkv_cache_can_extend(cache, 64, &fits, &error) != ETKV_OK ||
      etkv_cache_can_extend(cache, 65, &too_many, &error) != ETKV_OK) {
    return failed("etkv_cache_can_extend", error);
  }
  etkv_cache_free(cache);
  etkv_session_free(session);
  printf("etkv %s on MLX %s\n", etkv_version(), etkv_mlx_version());
  return fits && !too_many ? 0 : 1;
}
