// Runs a program on a cache without naming the delegate. If the program loads, the delegate has registered itself. If
// the cache grows, the delegate and the cache use the same registry.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

#include <etkv/executorch.hpp>

#ifdef LOGGED
// Functions of log.c, which print the log and the cache's report.
extern "C" int print_log(void);
extern "C" int end_log(const etkv_cache* cache);
#endif

template <typename T>
void must(const etkv::Result<T>& result) {
  if (!result) {
    std::fprintf(stderr, "%s\n", result.error().message().c_str());
    std::exit(1);
  }
}

int main(int argc, char** argv) {
#ifdef LOGGED
  if (print_log() != 0) {
    return 1;
  }
#endif
  executorch::extension::Module module(argc > 1 ? argv[1] : "");
  auto params = etkv::read_kv_cache_metadata(module);
  must(params);
  auto session = etkv::make_decode_session(
      params->backend_id, etkv::make_config(*params, 64, "f32"));
  must(session);
  etkv::LoadOptions options(session->key());
  must(etkv::load_method(module, "forward", options));

  std::vector<std::int64_t> tokens{1, 2, 3, 4};
  std::vector<std::int64_t> positions(tokens.size());
  std::iota(positions.begin(), positions.end(), 0);
  const int T = static_cast<int>(tokens.size());
  auto ids = executorch::extension::from_blob(
      tokens.data(), {1, T}, executorch::aten::ScalarType::Long);
  auto at = executorch::extension::from_blob(
      positions.data(), {T}, executorch::aten::ScalarType::Long);
  must(etkv::execute(module, "forward", {ids, at}));

#ifdef LOGGED
  return end_log(session->cache().raw());
#endif
  std::printf("%d positions of %d\n", *session->cache().length(), T);
  return *session->cache().length() == T ? 0 : 1;
}
