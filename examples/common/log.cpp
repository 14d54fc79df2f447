#include "examples/common/log.hpp"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string_view>

#include <executorch/runtime/platform/platform.h>

namespace etkv::examples {
namespace {

void discard(
    et_timestamp_t,
    et_pal_log_level_t,
    const char*,
    const char*,
    size_t,
    const char*,
    size_t) {}

const char* name(LogLevel level) {
  switch (level) {
    case LogLevel::error:
      return "ERROR";
    case LogLevel::warn:
      return "WARN";
    case LogLevel::info:
      return "INFO";
    case LogLevel::debug:
      return "DEBUG";
    case LogLevel::trace:
      return "TRACE";
  }
  return "?";
}

/// Writes the line with one call, so that the lines of several threads do not
/// mix.
void print(LogLevel level, std::string_view target, std::string_view message) {
  using namespace std::chrono;
  const auto now = system_clock::now().time_since_epoch();
  const auto seconds = static_cast<std::time_t>(
      duration_cast<std::chrono::seconds>(now).count());
  const auto micros =
      static_cast<long>(duration_cast<microseconds>(now).count() % 1000000);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char time[32];
  std::strftime(time, sizeof(time), "%Y-%m-%dT%H:%M:%S", &utc);
  std::fprintf(
      stderr,
      "%s.%06ldZ %5s %.*s %.*s\n",
      time,
      micros,
      name(level),
      static_cast<int>(target.size()),
      target.data(),
      static_cast<int>(message.size()),
      message.data());
}

} // namespace

Result<void> print_log_as_asked() {
  const char* filter = std::getenv("ETKV_LOG");
  if (filter == nullptr || *filter == '\0') {
    return {};
  }
  auto set = set_log_callback(filter, print);
  if (!set.ok()) {
    return Error(set.error().status(), "ETKV_LOG: " + set.error().message());
  }
  return set;
}

void quiet_executorch() {
  const char* verbose = std::getenv("ETKV_VERBOSE");
  if (verbose != nullptr && std::string_view(verbose) != "0" &&
      std::string_view(verbose) != "") {
    return;
  }
  executorch::runtime::register_pal(
      executorch::runtime::PalImpl::create(discard, __FILE__));
}

} // namespace etkv::examples
