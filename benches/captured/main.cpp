// etkv_captured: compares steps that are captured as one CUDA graph with the
// same steps in the interpreter, in turn. It compares logits, hidden states,
// chosen ids and times. A draft that reads hidden states gets generated ones,
// and runs a single sequence.
//
//   etkv_captured MODEL.pte [LONGEST [ROUNDS [KV_FORMAT [SEEDS]]]]
//
// LONGEST is the maximum number of positions (2000). ROUNDS is the number of
// timed steps for each number of tokens (64). KV_FORMAT is the format of keys
// and values (the program's dtype, as `native`). SEEDS is the number of seeds
// of generated operations (none). Exits with 1 in four cases: no step is
// captured; the interpreter runs a step of few tokens instead; logits differ by
// more than the rounding of the program's dtype explains; a captured step
// chooses an id that is not the argmax of its logits.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "benches/captured/agreement.hpp"
#include "benches/captured/both.hpp"
#include "benches/captured/comparisons.hpp"
#include "benches/captured/given.hpp"
#include "benches/captured/log.hpp"
#include "benches/common.hpp"
#include "etkv/executorch.hpp"
#include "examples/common/clock.hpp"
#include "examples/common/log.hpp"
#include "examples/common/program.hpp"

namespace {

using etkv::Cache;
using etkv::benches::Agreement;
using etkv::benches::equal;
using etkv::benches::greatest;
using etkv::benches::Log;
using etkv::benches::median;
using etkv::benches::must;
using etkv::benches::not_greatest;
using etkv::examples::Stopwatch;

/// A program with a contiguous cache.
using Contiguous = etkv::benches::Side<Cache>;

struct Side : Contiguous {
  using Contiguous::Contiguous;

  int32_t length() const {
    return must(session.cache().length());
  }

  /// Runs tokens at the end of the cache. Returns all logits.
  std::vector<float> step(const std::vector<int64_t>& tokens) {
    return etkv::benches::rows_of(run(tokens, length()));
  }

  /// Runs tokens of a draft with hidden states, the first at position `at`.
  etkv::examples::LogitsView run(
      const std::vector<int64_t>& tokens,
      int32_t at) {
    if (!is_draft()) {
      return must(program.step_at(tokens.data(), at, tokens.size()));
    }
    std::vector<int64_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), at);
    const auto given = etkv::benches::given_rows(
        *program.hidden_state_type(), static_cast<size_t>(at), tokens.size());
    return must(
        program.step(tokens.data(), positions.data(), tokens.size(), given));
  }

  /// Returns whether the program reads hidden states. For such a program the
  /// device does not choose ids.
  bool is_draft() const {
    return program.draft_tap().has_value();
  }

  /// Runs tokens, the first at position `at`. The device chooses ids.
  std::vector<int64_t> choose(const std::vector<int64_t>& tokens, int32_t at) {
    std::vector<int32_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), at);
    return must(etkv::choose(session.cache(), tokens, positions));
  }

  /// Returns the milliseconds of a step: the step copies logits to the host, or
  /// the device chooses ids.
  double timed(const std::vector<int64_t>& tokens, bool chosen) {
    const int32_t at = length();
    Stopwatch watch;
    if (chosen) {
      choose(tokens, at);
    } else {
      run(tokens, at);
    }
    return 1e3 * watch.lap();
  }

  void fill(size_t n) {
    must(session.cache().clear());
    for (size_t at = 0; at < n; at += 64) {
      const auto some = tokens(at, std::min<size_t>(64, n - at));
      run(some, static_cast<int32_t>(at));
    }
  }

  /// Returns the tokens at `n` positions.
  std::vector<int64_t> tokens(size_t at, size_t n) const {
    std::vector<int64_t> made(n);
    for (size_t i = 0; i < n; ++i) {
      made[i] = static_cast<int64_t>(
          ((at + i) * 2654435761U >> 7) %
          static_cast<uint64_t>(program.vocabulary()));
    }
    return made;
  }
};

/// Runs the same steps on both sides. Returns whether they agree.
bool compare(Side& captured, Side& interpreted, Log& log, size_t longest) {
  bool agree = true;
  size_t rows = 0;
  size_t same_chosen = 0;
  size_t wrong = 0;
  std::set<size_t> sizes;
  for (const size_t after : {size_t{0}, size_t{70}, longest / 2, longest}) {
    captured.fill(after);
    interpreted.fill(after);
    Agreement agreement;
    Agreement hidden;
    for (const size_t n : {1, 2, 3, 5, 8, 13, 16, 24, 64, 41, 1, 1}) {
      const int32_t at = captured.length();
      const auto tokens = captured.tokens(static_cast<size_t>(at), n);
      const size_t before = log.captured();
      const auto found = captured.step(tokens);
      if (log.captured() > before) {
        sizes.insert(n);
      }
      agreement.add(found, interpreted.step(tokens), n);
      const auto states = etkv::benches::hidden_of(captured.program);
      if (!states.empty()) {
        hidden.add(states, etkv::benches::hidden_of(interpreted.program), n);
      }
      if (captured.is_draft()) {
        continue;
      }
      const auto chosen = captured.choose(tokens, at);
      rows += n;
      wrong += not_greatest(found, chosen);
      same_chosen += equal(chosen, interpreted.choose(tokens, at));
    }
    agreement.print(("after " + std::to_string(after)).c_str());
    if (!agreement.is_rounding()) {
      std::fprintf(stderr, "etkv_captured: these logits differ by too much\n");
      agree = false;
    }
    if (captured.program.hidden_states()) {
      hidden.print(("after " + std::to_string(after)).c_str(), "hidden states");
      if (!hidden.is_rounding()) {
        std::fprintf(
            stderr, "etkv_captured: these hidden states differ by too much\n");
        agree = false;
      }
    }
  }
  if (!captured.is_draft()) {
    std::printf("%zu of %zu rows have the same chosen id\n", same_chosen, rows);
  }
  std::printf("steps are captured for");
  for (const size_t n : sizes) {
    std::printf(" %zu", n);
  }
  std::printf(" tokens\n");
  if (sizes.empty()) {
    std::fprintf(
        stderr,
        "etkv_captured: no step is captured, so the interpreter was compared "
        "with itself\n");
    agree = false;
  }
  if (wrong > 0) {
    std::fprintf(
        stderr,
        "etkv_captured: captured steps chose %zu of %zu ids that are not the "
        "argmax of their logits\n",
        wrong,
        rows);
    agree = false;
  }
  return agree;
}

/// Prints the times of steps on both sides.
void measure(Side& captured, Side& interpreted, size_t longest, size_t rounds) {
  for (const size_t after : {size_t{256}, longest}) {
    if (after > longest) {
      continue;
    }
    for (const bool chosen : {false, true}) {
      if (chosen && captured.is_draft()) {
        continue;
      }
      for (const size_t n : {1, 2, 4, 8, 16, 32, 64}) {
        std::vector<double> times[2];
        const std::vector<int64_t> tokens(n, 1);
        captured.fill(after);
        interpreted.fill(after);
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
            "after %5zu, %2zu tokens, %s: captured %.3f ms, interpreted %.3f, "
            "%.2f times\n",
            after,
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

/// Compares a captured text that returns its last row of logits with the same
/// captured text that returns all rows. Returns whether all bits of these
/// logits and of the hidden states are equal.
bool compare_rows(Side& all, Side& last) {
  bool same = true;
  for (const size_t n : {2, 7, 16, 41, 64}) {
    const auto tokens = all.tokens(0, n);
    must(all.session.cache().clear());
    must(last.session.cache().clear());
    const auto rows = all.step(tokens);
    const auto row = last.step(tokens);
    const size_t width = rows.size() / n;
    same = same && row.size() == width &&
           std::equal(row.rbegin(), row.rend(), rows.rbegin()) &&
           etkv::benches::hidden_of(all.program) ==
               etkv::benches::hidden_of(last.program);
  }
  std::printf(
      "the last row of text, 2 to 64 tokens: %s\n",
      same ? "equal bits" : "different bits");
  return same;
}

} // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(
        stderr,
        "usage: etkv_captured MODEL.pte [LONGEST [ROUNDS [KV_FORMAT "
        "[SEEDS]]]]\n");
    return 2;
  }
  etkv::examples::quiet_executorch();
  const size_t longest = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 2000;
  const size_t rounds = argc > 3 ? std::strtoul(argv[3], nullptr, 10) : 64;
  const std::string named = argc > 4 ? argv[4] : "native";
  const std::string format = named == "native" ? "" : named;
  const unsigned long seeds = argc > 5 ? std::strtoul(argv[5], nullptr, 10) : 0;
  if (rounds < 1) {
    std::fprintf(stderr, "etkv_captured: ROUNDS must be at least 1\n");
    return 2;
  }
  const auto capacity = static_cast<int32_t>(longest + 256 + 2 * rounds);
  // Logging stops before steps are timed.
  auto log = std::make_unique<Log>();
  using etkv::Logits;
  using etkv::Passes;
  Side captured(argv[1], format, Passes::standard, capacity, Logits::all);
  if (captured.is_draft() && seeds > 0) {
    std::fprintf(
        stderr,
        "etkv_captured: a draft with hidden states has no generated "
        "operations: omit SEEDS\n");
    return 2;
  }
  const size_t before = log->captured();
  Side interpreted(argv[1], format, Passes::interpreted, capacity, Logits::all);
  if (log->captured() > before) {
    std::fprintf(stderr, "etkv_captured: passes=interpreted captures a step\n");
    return 1;
  }
  bool agree = compare(captured, interpreted, *log, longest);
  {
    Side last(argv[1], format, Passes::standard, capacity);
    agree = compare_rows(captured, last) && agree;
  }
  if (!captured.is_draft()) {
    agree = etkv::benches::compare_shared(argv[1], format, *log) && agree;
  }
  if (seeds > 0) {
    const auto n = static_cast<uint32_t>(seeds);
    agree = etkv::benches::compare_generated(argv[1], format, n, *log) && agree;
  }
  for (const auto& reason : log->reasons()) {
    std::fprintf(stderr, "etkv_captured: log: %s\n", reason.c_str());
  }
  if (log->interpreted() > 0) {
    std::fprintf(
        stderr,
        "etkv_captured: the interpreter ran %zu steps of sizes that are "
        "captured in other steps\n",
        log->interpreted());
    agree = false;
  }
  log.reset();
  if (!agree) {
    return 1;
  }
  measure(captured, interpreted, longest, rounds);
  return 0;
}
