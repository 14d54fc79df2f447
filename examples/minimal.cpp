// A runner at its shortest: token ids in, 16 greedy token ids out.
//
//   etkv_minimal MODEL.pte ID...
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "etkv/executorch.hpp"

using executorch::extension::from_blob;
using executorch::extension::Module;

template <typename Result>
Result must(Result result) {
  if (!result) {
    std::fprintf(stderr, "%s\n", result.error().message().c_str());
    std::exit(1);
  }
  return result;
}

int main(int argc, char** argv) {
  std::vector<int64_t> tokens;
  for (int i = 2; i < argc; ++i) {
    tokens.push_back(std::atoll(argv[i]));
  }
  Module module(argc > 1 ? argv[1] : "", Module::LoadMode::Mmap);
  auto params = must(etkv::read_kv_cache_metadata(module));
  auto config = etkv::make_config(*params, /*capacity=*/4096, ETKV_FORMAT_F32);
  auto session = must(etkv::make_decode_session(etkv::kMLXBackend, config));
  etkv::LoadOptions options(session->key());
  options.logits(etkv::Logits::last);
  must(etkv::load_method(module, "forward", options));

  for (int n = 0; n < 16 && session->cache().can_extend(tokens.size()); ++n) {
    const int T = tokens.size();
    std::vector<int64_t> positions(T);
    std::iota(positions.begin(), positions.end(), session->cache().length());
    constexpr auto kLong = executorch::aten::ScalarType::Long;
    auto outputs = must(
        etkv::execute(
            module,
            "forward",
            {from_blob(tokens.data(), {1, T}, kLong),
             from_blob(positions.data(), {T}, kLong)}));
    const auto& logits =
        outputs->front().toTensor(); // float32 [1, 1, vocabulary]
    const float* row = logits.const_data_ptr<float>();
    tokens = {std::max_element(row, row + logits.numel()) - row};
    std::printf("%lld\n", static_cast<long long>(tokens[0]));
  }
}
