// Log messages of a program's steps, and reports of the state after them.

#include <atomic>
#include <mutex>
#include <thread>

#include "fixture.hpp"

namespace etkv::tests {
namespace {

/// Messages, as lines of level, target and text.
struct LogLines {
  std::mutex mutex;
  std::vector<std::string> lines;

  LogCallback callback() {
    return
        [this](LogLevel level, std::string_view target, std::string_view text) {
          const std::lock_guard<std::mutex> lock(mutex);
          lines.push_back(
              std::to_string(static_cast<int>(level)) + " " +
              std::string(target) + " " + std::string(text));
        };
  }
  std::vector<std::string> take() {
    const std::lock_guard<std::mutex> lock(mutex);
    return std::exchange(lines, {});
  }
};

int count(const std::vector<std::string>& lines, const std::string& words) {
  int n = 0;
  for (const auto& line : lines) {
    n += line.find(words) != std::string::npos ? 1 : 0;
  }
  return n;
}

void check_count(
    int line,
    const std::vector<std::string>& lines,
    const std::string& words,
    int wanted) {
  const int found = count(lines, words);
  check_int(__FILE__, line, words.c_str(), found, wanted);
  if (found != wanted) {
    for (const auto& text : lines) {
      std::printf("  %s\n", text.c_str());
    }
  }
}
#define CHECK_COUNT(lines, words, wanted) \
  check_count(__LINE__, (lines), (words), (wanted))

void a_step_is_told() {
  LogLines heard;
  must(set_log_callback("debug", heard.callback()));
  Bound bound;
  const auto load = heard.take();
  CHECK_COUNT(load, "3 etkv::program load{", 1);
  CHECK_COUNT(load, ": a program is loaded instructions=", 1);
  CHECK_COUNT(load, "pass{name=\"fuse_linear\"}: done took_us=", 1);

  bound.at(0, text(3));
  const auto step = heard.take();
  CHECK_COUNT(
      step,
      "4 etkv::core forward: step{tokens=3 first=0 mask=causal read=3}: done",
      1);
  CHECK_COUNT(step, "4 etkv::core forward: step{", 3);
  CHECK_COUNT(step, ": grow{layer=0 from=0 to=4}: done", 1);
  CHECK_COUNT(step, ": grow{layer=1 from=0 to=4}: done", 1);
  CHECK_COUNT(step, "4 etkv::program forward: done", 1);

  bound.at(3, text(1));
  CHECK_COUNT(heard.take(), "step{tokens=1 first=3 mask=none read=4}: done", 1);

  // The cache refuses a step with a gap, so the forward fails.
  const auto refused = bound.model.step({1}, {9});
  CHECK_REFUSED(refused, ETKV_ERROR_POSITION, "position 9");
  const auto told = heard.take();
  CHECK_COUNT(
      told, "2 etkv::core forward: a step is refused tokens=1 first=9", 1);
  CHECK_COUNT(told, "2 etkv::program a forward fails status=Position", 1);
  CHECK_COUNT(told, "is rolled back", 0);

  must(set_log_callback("warn", heard.callback()));
  bound.at(4, text(1));
  CHECK_INT(heard.take().size(), 0);
  must(set_log_callback("", nullptr));
  CHECK(!bound.model.step({1}, {9}).ok());
  CHECK_INT(heard.take().size(), 0);
}

void layers_are_told_on_trace() {
  LogLines heard;
  Bound bound;
  must(set_log_callback("etkv::core=trace", heard.callback()));
  bound.at(0, text(5));
  must(set_log_callback("", nullptr));
  const auto told = heard.take();
  CHECK_COUNT(
      told,
      "5 etkv::core step{tokens=5 first=0 mask=causal read=5}: a layer layer=",
      2);
  CHECK_COUNT(told, "etkv::program", 0);
}

/// A replaced callback no longer runs, so its state may be freed.
void callbacks_are_replaced_while_steps_run() {
  Bound bound;
  std::atomic<bool> over{false};
  std::thread steps([&] {
    while (!over) {
      bound.at(0, text(2));
    }
  });
  for (int i = 0; i < 200; ++i) {
    auto seen = std::make_unique<std::atomic<int>>(0);
    must(set_log_callback(
        "trace", [&seen](LogLevel, std::string_view, std::string_view) {
          seen->fetch_add(1);
        }));
    while (i % 20 == 0 && seen->load() == 0) {
      std::this_thread::yield();
    }
    must(set_log_callback("", nullptr));
    seen.reset();
  }
  over = true;
  steps.join();
  CHECK_INT(*bound.cache().length(), 2);
}

void reports_tell_of_a_cache() {
  On<SeqCache> bound;
  must(bound->begin_step({4, 4, 4}));
  bound.model.at(0, text(3));
  const std::string report = must(cache_report(bound.session.cache()));
  const char* json = report.c_str();
  CHECK_HAS(json, "\"kind\":\"seq\",\"length\":3,\"capacity\":64");
  CHECK_HAS(
      json,
      "\"sequences\":[{\"sequence\":4,\"length\":3,\"next\":3,\"rewindable_"
      "to\":0,"
      "\"tree\":0}]");
  CHECK_HAS(json, "\"slots\":4,");
  CHECK_REFUSED(describe_program(nullptr, 0), ETKV_ERROR_PROGRAM, "0 bytes");
}

} // namespace
} // namespace etkv::tests

int main() {
  etkv::examples::quiet_executorch();
  using namespace etkv::tests;
  a_step_is_told();
  layers_are_told_on_trace();
  callbacks_are_replaced_while_steps_run();
  reports_tell_of_a_cache();
  return check_report();
}
