// etkv_two_programs: the speed of two programs on two threads, compared with
// running one after the other. The ratio shows how far the programs' steps
// overlap. CPU programs use one thread each.
//
//   etkv_two_programs MODEL.pte [TOKENS [ROUNDS]]
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <thread>

#include <executorch/extension/threadpool/threadpool_guard.h>

#include "benches/common.hpp"
#include "etkv/executorch.hpp"
#include "examples/common/clock.hpp"
#include "examples/common/logits.hpp"
#include "examples/common/program.hpp"

namespace {

using etkv::benches::must;
using etkv::examples::Program;
using executorch::extension::threadpool::NoThreadPoolGuard;

/// A program with a session, which decodes greedily.
class Decoder {
 public:
  Decoder(const char* path, int32_t capacity)
      : program_(must(Program::open(path))),
        session_(must(
            etkv::make_decode_session(
                program_.params().backend_id,
                etkv::make_config(program_.params(), capacity, "f32")))) {
    const NoThreadPoolGuard one_thread;
    must(program_.load(session_.key(), etkv::Logits::last));
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
  void step() {
    const NoThreadPoolGuard one_thread;
    const int32_t at = must(session_.cache().length());
    const auto logits =
        must(program_.step_at(tokens_.data(), at, tokens_.size()));
    tokens_ = {must(etkv::examples::argmax(logits, logits.last_row()))};
  }

  Program program_;
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
