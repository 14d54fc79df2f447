// Steps that are captured as one launch of a GPU, and the same steps of the
// interpreter: how far their logits are apart, and what they take, in turns.
//
//   etkv_captured MODEL.pte [LONGEST [ROUNDS]]
//
// LONGEST is the most positions (2000), ROUNDS the steps that are timed of each
// number of tokens (64). Ends with 1 if logits are apart by more than the
// rounding of the program's dtype explains.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "etkv/executorch.hpp"
#include "examples/common/clock.hpp"
#include "examples/common/log.hpp"
#include "examples/common/logits.hpp"
#include "examples/common/program.hpp"

namespace {

using etkv::Cache;
using etkv::Result;
using etkv::examples::LogitsView;
using etkv::examples::Program;
using etkv::examples::Stopwatch;

template <typename T>
T must(Result<T> result) {
  if (!result) {
    std::fprintf(stderr, "%s\n", result.error().message().c_str());
    std::exit(1);
  }
  return std::move(result).value();
}

void must(const Result<void>& result) {
  if (!result) {
    std::fprintf(stderr, "%s\n", result.error().message().c_str());
    std::exit(1);
  }
}

double median(std::vector<double> times) {
  std::nth_element(
      times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

/// A program on a cache of its own.
struct Side {
  Side(const char* path, int32_t capacity, etkv::Passes passes)
      : program(must(Program::open(path))),
        session(must(
            etkv::make_decode_session(
                program.params().backend_id,
                etkv::make_config(
                    program.params(),
                    capacity,
                    program.native_format())))) {
    must(program.load(session.key(), etkv::Logits::all, passes));
    must(etkv::warm_up(session.cache()));
  }

  /// Runs the tokens behind what the cache holds. Returns all logits.
  std::vector<float> step(const std::vector<int64_t>& tokens) {
    const int64_t at = must(session.cache().length());
    const auto logits = must(program.step_at(tokens.data(), at, tokens.size()));
    std::vector<float> rows(
        static_cast<size_t>(logits.rows * logits.vocabulary));
    for (int64_t row = 0; row < logits.rows; ++row) {
      etkv::examples::copy_row(
          logits, row, rows.data() + row * logits.vocabulary);
    }
    return rows;
  }

  /// Milliseconds of a step whose logits the host gets, or whose ids the device
  /// chooses.
  double timed(const std::vector<int64_t>& tokens, bool choose) {
    const int32_t at = must(session.cache().length());
    std::vector<int32_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), at);
    Stopwatch watch;
    if (choose) {
      must(etkv::choose(session.cache(), tokens, positions));
    } else {
      must(program.step_at(tokens.data(), at, tokens.size()));
    }
    return 1e3 * watch.lap();
  }

  void fill(size_t n) {
    must(session.cache().clear());
    for (size_t at = 0; at < n; at += 64) {
      std::vector<int64_t> tokens(std::min<size_t>(64, n - at));
      for (size_t i = 0; i < tokens.size(); ++i) {
        tokens[i] = token(at + i);
      }
      must(program.step_at(
          tokens.data(), static_cast<int64_t>(at), tokens.size()));
    }
  }

  int64_t token(size_t position) const {
    return static_cast<int64_t>(
        (position * 2654435761U >> 7) %
        static_cast<uint64_t>(program.vocabulary()));
  }

  Program program;
  etkv::CacheSession<Cache> session;
};

} // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: etkv_captured MODEL.pte [LONGEST [ROUNDS]]\n");
    return 2;
  }
  etkv::examples::quiet_executorch();
  const size_t longest = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 2000;
  const size_t rounds = argc > 3 ? std::strtoul(argv[3], nullptr, 10) : 64;
  const auto capacity = static_cast<int32_t>(longest + 64 + 2 * rounds);
  Side captured(argv[1], capacity, etkv::Passes::standard);
  Side interpreted(argv[1], capacity, etkv::Passes::interpreted);

  double worst = 0.0;
  size_t rows = 0;
  size_t same = 0;
  for (const size_t behind : {size_t{0}, size_t{70}, longest / 2, longest}) {
    captured.fill(behind);
    interpreted.fill(behind);
    double apart = 0.0;
    double largest = 0.0;
    for (const size_t n : {1, 2, 3, 5, 8, 13, 16, 1, 1}) {
      const auto at =
          static_cast<size_t>(must(captured.session.cache().length()));
      std::vector<int64_t> tokens(n);
      for (size_t i = 0; i < n; ++i) {
        tokens[i] = captured.token(at + i);
      }
      const auto a = captured.step(tokens);
      const auto b = interpreted.step(tokens);
      const size_t wide = b.size() / n;
      for (size_t i = 0; i < b.size(); ++i) {
        const double off = std::abs(double{a[i]} - double{b[i]});
        apart = off <= apart ? apart : off;
        largest = std::max(largest, std::abs(double{b[i]}));
      }
      for (size_t row = 0; row < n; ++row) {
        const auto best = [&](const std::vector<float>& of) {
          const auto from =
              of.begin() + static_cast<std::ptrdiff_t>(row * wide);
          return std::max_element(
                     from, from + static_cast<std::ptrdiff_t>(wide)) -
                 from;
        };
        ++rows;
        same += best(a) == best(b) ? 1 : 0;
      }
    }
    std::printf(
        "behind %5zu: logits apart by %.4f of up to %.3f\n",
        behind,
        apart,
        largest);
    std::fflush(stdout);
    worst = std::max(worst, largest > 0.0 ? apart / largest : apart);
  }
  std::printf(
      "%zu of %zu rows have the same greatest logit; apart by %.4f of the "
      "largest\n",
      same,
      rows,
      worst);

  for (const size_t behind : {size_t{256}, longest}) {
    if (behind > longest) {
      continue;
    }
    for (const bool choose : {false, true}) {
      for (const size_t n : {1, 2, 4, 8, 16}) {
        std::vector<double> times[2];
        const std::vector<int64_t> tokens(n, 1);
        captured.fill(behind);
        interpreted.fill(behind);
        for (size_t round = 0; round < rounds; ++round) {
          size_t side = 0;
          for (Side* one : {&captured, &interpreted}) {
            times[side++].push_back(one->timed(tokens, choose));
            auto& cache = one->session.cache();
            must(cache.rewind(
                must(cache.length()) - static_cast<int32_t>(n) + 1));
          }
        }
        const double a = median(times[0]);
        const double b = median(times[1]);
        std::printf(
            "behind %5zu, %2zu tokens, %s: captured %.3f ms, interpreted %.3f, "
            "%.2f times\n",
            behind,
            n,
            choose ? "chosen on the device" : "logits to the host  ",
            a,
            b,
            b / a);
        std::fflush(stdout);
      }
    }
  }
  // In bfloat16 the sums of 16 layers in another order are a twentieth apart
  // where the largest logits are small. NaN is apart by more than all.
  return worst < 0.1 ? 0 : 1;
}
