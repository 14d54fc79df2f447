// etkv_two_programs: the speed of two programs on two threads, compared with
// running one after the other. The ratio shows how far the programs' steps
// overlap. CPU programs use one thread each.
//
//   etkv_two_programs MODEL.pte [TOKENS [ROUNDS]]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <thread>

#include <executorch/extension/threadpool/threadpool_guard.h>

#include "benches/common.hpp"
#include "etkv/executorch.hpp"
#include "examples/common/clock.hpp"

namespace {

using etkv::benches::must;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::extension::threadpool::NoThreadPoolGuard;

/// A program with a session, which decodes greedily.
class Decoder {
 public:
  Decoder(const char* path, int32_t capacity)
      : module_(path, Module::LoadMode::Mmap),
        session_(make_session(module_, capacity)) {
    const NoThreadPoolGuard one_thread;
    etkv::LoadOptions options(session_.key());
    options.logits(etkv::Logits::last);
    must(etkv::load_method(module_, "forward", options));
    tokens_.resize(8);
    std::iota(tokens_.begin(), tokens_.end(), 10);
    step();
  }

  void decode(int n) {
    for (int i = 0; i < n; ++i) {
      step();
    }
  }

  void rewind() {
    must(session_.cache().rewind(8));
  }

 private:
  static etkv::CacheSession<etkv::Cache> make_session(
      Module& module,
      int32_t capacity) {
    const auto params = must(etkv::read_kv_cache_metadata(module));
    return must(
        etkv::make_decode_session(
            params.backend_id, etkv::make_config(params, capacity, "f32")));
  }

  void step() {
    const NoThreadPoolGuard one_thread;
    const int n = static_cast<int>(tokens_.size());
    std::vector<int64_t> positions(n);
    std::iota(positions.begin(), positions.end(), *session_.cache().length());
    auto ids = from_blob(tokens_.data(), {1, n}, etkv::kLong);
    auto at = from_blob(positions.data(), {n}, etkv::kLong);
    const auto outputs = must(etkv::execute(module_, "forward", {ids, at}));
    const auto& logits = outputs.front().toTensor();
    const float* row = logits.const_data_ptr<float>();
    tokens_ = {std::max_element(row, row + logits.numel()) - row};
  }

  Module module_;
  etkv::CacheSession<etkv::Cache> session_;
  std::vector<int64_t> tokens_;
};

template <typename Work>
double seconds(const Work& work) {
  etkv::examples::Stopwatch watch;
  work();
  return watch.lap();
}

} // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(
        stderr, "usage: etkv_two_programs MODEL.pte [TOKENS [ROUNDS]]\n");
    return 2;
  }
  const int n = argc > 2 ? std::atoi(argv[2]) : 32;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 5;
  Decoder a(argv[1], 16 + n);
  Decoder b(argv[1], 16 + n);
  std::vector<double> ratios;
  for (int round = 0; round < rounds; ++round) {
    const double in_turn = seconds([&] {
      a.decode(n);
      b.decode(n);
    });
    a.rewind();
    b.rewind();
    const double together = seconds([&] {
      std::thread other([&] { b.decode(n); });
      a.decode(n);
      other.join();
    });
    a.rewind();
    b.rewind();
    ratios.push_back(in_turn / together);
    std::printf(
        "in turn %.1f tokens/s, together %.1f tokens/s, ratio %.2f\n",
        2 * n / in_turn,
        2 * n / together,
        ratios.back());
  }
  std::printf("median ratio %.2f\n", etkv::benches::median(ratios));
}
