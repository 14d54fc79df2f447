// The shortest runner: it reads token ids, and prints 16 greedy token ids. The
// program must be float32, and the prompt must fit one step.
//
//   etkv_minimal MODEL.pte ID...
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "etkv/executorch.hpp"

using executorch::extension::from_blob;
using executorch::extension::Module;

template <typename T>
void must(const etkv::Result<T>& result) {
  if (!result) {
    std::fprintf(stderr, "%s\n", result.error().message().c_str());
    std::exit(1);
  }
}

int main(int argc, char** argv) {
  if (argc < 3 || *argv[1] == '-') {
    std::printf("etkv_minimal MODEL.pte ID...\nPrints 16 greedy token ids.\n");
    return argc > 1 && *argv[1] == '-' ? 0 : 2;
  }
  Module module(argv[1], Module::LoadMode::Mmap);
  auto params = etkv::read_kv_cache_metadata(module);
  must(params);
  auto config = etkv::make_config(*params, params->max_context_length);
  auto session = etkv::make_decode_session(params->backend_id, config);
  must(session);
  etkv::LoadOptions options(session->key());
  options.logits(etkv::Logits::last);
  must(etkv::load_method(module, "forward", options));

  std::vector<int64_t> tokens;
  std::transform(
      argv + 2, argv + argc, std::back_inserter(tokens), [](const char* id) {
        return std::atoll(id);
      });
  for (int n = 0; n < 16 && *session->cache().can_extend(tokens.size()); ++n) {
    const int T = tokens.size();
    std::vector<int64_t> positions(T);
    std::iota(positions.begin(), positions.end(), *session->cache().length());
    auto ids = from_blob(tokens.data(), {1, T}, etkv::kLong);
    auto at = from_blob(positions.data(), {T}, etkv::kLong);
    auto outputs = etkv::execute(module, "forward", {ids, at});
    must(outputs);
    const auto& logits = outputs->front().toTensor(); // [1, 1, vocabulary]
    const float* row = logits.const_data_ptr<float>();
    tokens = {std::max_element(row, row + logits.numel()) - row};
    std::printf("%lld\n", static_cast<long long>(tokens[0]));
  }
}
