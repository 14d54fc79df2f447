// etkv_lengths: the times of steps at lengths that are new to the process, and
// at lengths that the process has run before. Steps are prompts, single tokens,
// and a few tokens to verify.
//
//   etkv_lengths MODEL.pte [KV_FORMAT [LONGEST [PROMPTS [STEPS]]]] [--json]
//
// LONGEST is the maximum number of tokens of a prompt (default 4000), PROMPTS
// the number of lengths (default 20), STEPS the number of steps of one token
// after each prompt (default 64). --json adds a line with every time.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
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

/// Milliseconds until the host has chosen a token.
double timed(const std::function<etkv::examples::LogitsView()>& step) {
  Stopwatch watch;
  const auto logits = step();
  must(etkv::examples::argmax(logits, logits.last_row()));
  return 1e3 * watch.lap();
}

void print(const std::string& what, const std::vector<double>& times) {
  const auto [least, most] = std::minmax_element(times.begin(), times.end());
  std::printf(
      "%-44s median %9.3f ms   minimum %9.3f   maximum %9.3f\n",
      what.c_str(),
      median(times),
      *least,
      *most);
  std::fflush(stdout);
}

/// Returns a list of numbers as JSON.
template <typename T>
std::string list(const std::vector<T>& numbers) {
  std::string text = "[";
  for (const T number : numbers) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(number);
  }
  return text + "]";
}

} // namespace

int main(int argc, char** argv) {
  bool json = false;
  for (int i = argc - 1; i > 0; --i) {
    if (std::strcmp(argv[i], "--json") == 0) {
      json = true;
      std::move(argv + i + 1, argv + argc, argv + i);
      --argc;
    }
  }
  if (argc < 2) {
    std::fprintf(
        stderr,
        "usage: etkv_lengths MODEL.pte [KV_FORMAT [LONGEST [PROMPTS [STEPS]]]] "
        "[--json]\n");
    return 2;
  }
  etkv::examples::quiet_executorch();
  auto program = must(Program::open(argv[1]));
  const std::string format = argc > 2 ? argv[2] : program.native_format();
  const int64_t longest = argc > 3 ? std::atoll(argv[3]) : 4000;
  const int64_t prompts = argc > 4 ? std::atoll(argv[4]) : 20;
  const int64_t steps = argc > 5 ? std::atoll(argv[5]) : 64;
  if (longest < 128 || prompts < 1 || steps < 1) {
    std::fprintf(
        stderr,
        "etkv_lengths: LONGEST must be at least 128, the other numbers 1\n");
    return 2;
  }
  const auto& params = program.params();
  auto session = must(
      etkv::make_decode_session(
          params.backend_id,
          etkv::make_config(
              params, static_cast<int32_t>(longest + 64), format)));
  Cache& cache = session.cache();
  Stopwatch watch;
  must(program.load(session.key(), etkv::Logits::last));
  const double loaded = watch.lap();
  if (params.backend_id == etkv::kMLXBackend) {
    must(etkv::warm_up(cache));
  }
  std::printf(
      "%s, %s: loaded in %.1f s, warm in %.1f s\n",
      argv[1],
      format.c_str(),
      loaded,
      watch.lap());

  std::vector<int64_t> tokens(static_cast<size_t>(longest) + 64);
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<int64_t>(10 + i * 31 % 200);
  }
  const auto prompt = [&](int64_t n) {
    must(cache.clear());
    return timed([&] {
      return *must(
          etkv::examples::prefill(
              program, tokens.data(), 0, static_cast<size_t>(n), 0, {}));
    });
  };
  // The device chooses the token, so that the logits stay on the device.
  const auto step = [&](int64_t n) {
    const int32_t at = must(cache.length());
    std::vector<int32_t> positions(static_cast<size_t>(n));
    std::iota(positions.begin(), positions.end(), at);
    const auto first = tokens.begin() + at;
    Stopwatch watch;
    must(etkv::choose(cache, {first, first + n}, positions));
    return 1e3 * watch.lap();
  };

  const double first = prompt(40);
  const double second = prompt(41);
  std::printf("first prompt of 40 tokens: %.1f ms\n", first);
  std::printf("second, of 41: %.1f ms\n", second);
  // The order of lengths is not monotonic, so no prompt continues another.
  std::vector<int64_t> lengths;
  std::vector<double> fresh;
  std::vector<double> again;
  std::vector<double> ratios;
  for (int64_t i = 0; i < prompts; ++i) {
    const int64_t n = 100 + (longest - 100) * (i * 7 % prompts) / prompts + i;
    lengths.push_back(n);
    fresh.push_back(prompt(n));
    again.push_back(prompt(n));
    ratios.push_back(fresh.back() / again.back());
  }
  print("prompts, new lengths", fresh);
  print("prompts, the same lengths again", again);
  std::printf(
      "ratio, median %.2f, maximum %.2f\n",
      median(ratios),
      *std::max_element(ratios.begin(), ratios.end()));

  std::string measured;
  const auto add =
      [&](int64_t context, int64_t n, const std::vector<double>& times) {
        measured += (measured.empty() ? "" : ", ") +
                    ("{\"context\": " + std::to_string(context)) +
                    ", \"tokens\": " + std::to_string(n) +
                    ", \"ms\": " + list(times) + "}";
      };
  // A verification needs a row for each of its tokens.
  must(cache.clear());
  must(program.load(session.key(), etkv::Logits::all));
  if (params.backend_id == etkv::kMLXBackend) {
    must(etkv::warm_up(cache));
  }
  for (const int64_t context : {int64_t{128}, longest / 2}) {
    prompt(context);
    std::vector<double> ones;
    for (int64_t i = 0; i < steps; ++i) {
      ones.push_back(step(1));
    }
    add(context, 1, ones);
    print("a token after " + std::to_string(context), ones);
    const double one = median(ones);
    std::printf("  %.1f tokens/s\n", 1e3 / one);
    for (const int64_t n : {2, 4, 8, 16}) {
      prompt(context + n);
      std::vector<double> times;
      for (int64_t i = 0; i < std::max<int64_t>(steps * 3 / 8, 1); ++i) {
        times.push_back(step(n));
        // Continues as if the verification had accepted one token.
        must(cache.rewind(must(cache.length()) - static_cast<int32_t>(n) + 1));
      }
      print("  " + std::to_string(n) + " tokens, a new length each", times);
      add(context, n, times);
      std::printf("  %.2f times one token\n", median(times) / one);
    }
  }
  if (json) {
    std::printf(
        "{\"kv_format\": \"%s\", \"first_ms\": %f, \"second_ms\": %f, "
        "\"lengths\": %s, \"fresh_ms\": %s, \"again_ms\": %s, "
        "\"steps\": [%s]}\n",
        format.c_str(),
        first,
        second,
        list(lengths).c_str(),
        list(fresh).c_str(),
        list(again).c_str(),
        measured.c_str());
  }
  return 0;
}
