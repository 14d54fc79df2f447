// Creates, queries and frees a cache in C++.
#include <cstdio>

#include <etkv/etkv.hpp>

int main() {
  etkv::CacheConfig config;
  config.layers = {{/*n_kv_heads=*/2, /*k_head_dim=*/16}};
  config.capacity = 64;
  auto session = etkv::make_decode_session("MLXBackend", config);
  if (!session) {
    std::fprintf(stderr, "%s\n", session.error().message().c_str());
    return 1;
  }
  const auto& cache = session->cache();
  std::printf("%d of %d positions\n", *cache.length(), cache.capacity());
  return *cache.can_extend(64) && !*cache.can_extend(65) ? 0 : 1;
}
