// Steps that are captured as one launch of a GPU, and the same steps of the
// interpreter: how far their logits are apart, which ids they choose, and what
// they take, in turns.
//
//   etkv_captured MODEL.pte [LONGEST [ROUNDS]]
//
// LONGEST is the most positions (2000), ROUNDS the steps that are timed of each
// number of tokens (64). Ends with 1 if no step is captured, if logits are apart
// by more than the rounding of the program's dtype explains, and if a captured
// step chooses another id than that of its own greatest logit.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "benches/common.hpp"
#include "etkv/executorch.hpp"
#include "examples/common/clock.hpp"
#include "examples/common/log.hpp"
#include "examples/common/logits.hpp"
#include "examples/common/program.hpp"

namespace {

using etkv::Cache;
using etkv::benches::median;
using etkv::benches::must;
using etkv::examples::Program;
using etkv::examples::Stopwatch;

/// What etkv's log tells of captured steps.
class Log {
 public:
  Log() {
    must(
        etkv::set_log_callback(
            "etkv::program=debug",
            [this](etkv::LogLevel, std::string_view, std::string_view message) {
              take(message);
            }));
  }
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;
  ~Log() {
    must(etkv::set_log_callback("off", nullptr));
  }

  /// Steps that were captured, each anew when an address has changed.
  size_t captured() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return captured_;
  }

  /// Reasons why some were not.
  std::set<std::string> reasons() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return reasons_;
  }

 private:
  void take(std::string_view message) {
    const auto has = [&](const char* part) {
      return message.find(part) != std::string_view::npos;
    };
    const std::lock_guard<std::mutex> lock(mutex_);
    if (has("a step is captured")) {
      ++captured_;
    } else if (has("not captured") || has("no step is captured")) {
      reasons_.emplace(message);
    }
  }

  std::mutex mutex_;
  size_t captured_ = 0;
  std::set<std::string> reasons_;
};

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

  int32_t length() const {
    return must(session.cache().length());
  }

  /// Runs the tokens behind what the cache holds. Returns all logits.
  std::vector<float> step(const std::vector<int64_t>& tokens) {
    const auto logits =
        must(program.step_at(tokens.data(), length(), tokens.size()));
    std::vector<float> rows(
        static_cast<size_t>(logits.rows * logits.vocabulary));
    for (int64_t row = 0; row < logits.rows; ++row) {
      etkv::examples::copy_row(
          logits, row, rows.data() + row * logits.vocabulary);
    }
    return rows;
  }

  /// Runs them from position `at` on, and lets the device choose ids.
  std::vector<int64_t> choose(const std::vector<int64_t>& tokens, int32_t at) {
    std::vector<int32_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), at);
    return must(etkv::choose(session.cache(), tokens, positions));
  }

  /// Milliseconds of a step whose logits the host gets, or whose ids the device
  /// chooses.
  double timed(const std::vector<int64_t>& tokens, bool chosen) {
    const int32_t at = length();
    Stopwatch watch;
    if (chosen) {
      choose(tokens, at);
    } else {
      must(program.step_at(tokens.data(), at, tokens.size()));
    }
    return 1e3 * watch.lap();
  }

  void fill(size_t n) {
    must(session.cache().clear());
    for (size_t at = 0; at < n; at += 64) {
      const auto some = tokens(at, std::min<size_t>(64, n - at));
      must(program.step_at(some.data(), static_cast<int64_t>(at), some.size()));
    }
  }

  /// The tokens at `n` positions.
  std::vector<int64_t> tokens(size_t at, size_t n) const {
    std::vector<int64_t> made(n);
    for (size_t i = 0; i < n; ++i) {
      made[i] = static_cast<int64_t>(
          ((at + i) * 2654435761U >> 7) %
          static_cast<uint64_t>(program.vocabulary()));
    }
    return made;
  }

  Program program;
  etkv::CacheSession<Cache> session;
};

/// The place of the greatest logit of each row, the first of equal ones.
std::vector<int64_t> greatest(const std::vector<float>& logits, size_t rows) {
  const size_t wide = logits.size() / rows;
  std::vector<int64_t> places;
  for (size_t row = 0; row < rows; ++row) {
    const float* from = logits.data() + row * wide;
    places.push_back(std::max_element(from, from + wide) - from);
  }
  return places;
}

size_t equal(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  return std::inner_product(
      a.begin(),
      a.end(),
      b.begin(),
      size_t{0},
      std::plus<>(),
      [](auto x, auto y) { return size_t{x == y}; });
}

/// The larger number; NaN is larger than all.
double larger(double a, double b) {
  return std::isnan(a) || a > b ? a : b;
}

/// Runs the same steps on both sides. Returns whether they agree.
bool compare(Side& captured, Side& interpreted, Log& log, size_t longest) {
  double worst = 0.0;
  size_t rows = 0;
  size_t same = 0;
  size_t same_chosen = 0;
  size_t wrong = 0;
  std::set<size_t> sizes;
  for (const size_t behind : {size_t{0}, size_t{70}, longest / 2, longest}) {
    captured.fill(behind);
    interpreted.fill(behind);
    double apart = 0.0;
    double largest = 0.0;
    for (const size_t n : {1, 2, 3, 5, 8, 13, 16, 1, 1}) {
      const int32_t at = captured.length();
      const auto tokens = captured.tokens(static_cast<size_t>(at), n);
      const size_t before = log.captured();
      const auto a = captured.step(tokens);
      if (log.captured() > before) {
        sizes.insert(n);
      }
      const auto b = interpreted.step(tokens);
      for (size_t i = 0; i < b.size(); ++i) {
        apart = larger(std::abs(double{a[i]} - double{b[i]}), apart);
        largest = std::max(largest, std::abs(double{b[i]}));
      }
      const auto best = greatest(a, n);
      const auto chosen = captured.choose(tokens, at);
      rows += n;
      same += equal(best, greatest(b, n));
      wrong += n - equal(chosen, best);
      same_chosen += equal(chosen, interpreted.choose(tokens, at));
    }
    std::printf(
        "behind %5zu: logits apart by %.4f of up to %.3f\n",
        behind,
        apart,
        largest);
    std::fflush(stdout);
    worst = larger(largest > 0.0 ? apart / largest : apart, worst);
  }
  std::printf(
      "%zu of %zu rows have the same greatest logit, %zu the same chosen id; "
      "apart by %.4f of the largest\n",
      same,
      rows,
      same_chosen,
      worst);
  std::printf("captured are steps of");
  for (const size_t n : sizes) {
    std::printf(" %zu", n);
  }
  std::printf(" tokens\n");
  bool agree = true;
  const auto refuse = [&](const std::string& what) {
    std::fprintf(stderr, "etkv_captured: %s\n", what.c_str());
    agree = false;
  };
  if (sizes.empty()) {
    refuse("no step is captured, so the interpreter was compared with itself");
  }
  for (const auto& reason : log.reasons()) {
    std::fprintf(stderr, "etkv_captured: the log tells: %s\n", reason.c_str());
  }
  if (wrong > 0) {
    refuse(
        "captured steps chose " + std::to_string(wrong) + " of " +
        std::to_string(rows) + " ids that are not their greatest logit's");
  }
  // In bfloat16 the sums of 16 layers in another order are a twentieth apart
  // where the largest logits are small.
  if (!(worst < 0.1)) {
    refuse(
        "logits are apart by " + std::to_string(worst) +
        " of the largest, the most is 0.1");
  }
  return agree;
}

/// Prints what steps of both sides take.
void measure(Side& captured, Side& interpreted, size_t longest, size_t rounds) {
  for (const size_t behind : {size_t{256}, longest}) {
    if (behind > longest) {
      continue;
    }
    for (const bool chosen : {false, true}) {
      for (const size_t n : {1, 2, 4, 8, 16}) {
        std::vector<double> times[2];
        const std::vector<int64_t> tokens(n, 1);
        captured.fill(behind);
        interpreted.fill(behind);
        for (size_t round = 0; round < rounds; ++round) {
          size_t side = 0;
          for (Side* one : {&captured, &interpreted}) {
            times[side++].push_back(one->timed(tokens, chosen));
            must(one->session.cache().rewind(
                one->length() - static_cast<int32_t>(n) + 1));
          }
        }
        const double a = median(times[0]);
        const double b = median(times[1]);
        std::printf(
            "behind %5zu, %2zu tokens, %s: captured %.3f ms, interpreted %.3f, "
            "%.2f times\n",
            behind,
            n,
            chosen ? "chosen on the device" : "logits to the host  ",
            a,
            b,
            b / a);
        std::fflush(stdout);
      }
    }
  }
}

} // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: etkv_captured MODEL.pte [LONGEST [ROUNDS]]\n");
    return 2;
  }
  etkv::examples::quiet_executorch();
  const size_t longest = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 2000;
  const size_t rounds = argc > 3 ? std::strtoul(argv[3], nullptr, 10) : 64;
  if (rounds < 1) {
    std::fprintf(stderr, "etkv_captured: ROUNDS is at least 1\n");
    return 2;
  }
  const auto capacity = static_cast<int32_t>(longest + 64 + 2 * rounds);
  // The log ends before steps are timed.
  auto log = std::make_unique<Log>();
  Side captured(argv[1], capacity, etkv::Passes::standard);
  const size_t before = log->captured();
  Side interpreted(argv[1], capacity, etkv::Passes::interpreted);
  if (log->captured() > before) {
    std::fprintf(stderr, "etkv_captured: passes=interpreted captures a step\n");
    return 1;
  }
  const bool agree = compare(captured, interpreted, *log, longest);
  log.reset();
  if (!agree) {
    return 1;
  }
  measure(captured, interpreted, longest, rounds);
  return 0;
}
