// Observing a running etkv: its log, and reports. A part of etkv.hpp. See
// watch.h, docs/watching.md and docs/reports.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "etkv/cache.hpp"
#include "etkv/detail.hpp"
#include "etkv/result.hpp"
#include "etkv/watch.h"

namespace etkv {

// ---- The log ---------------------------------------------------------------

enum class LogLevel : etkv_log_level {
  error = ETKV_LOG_ERROR,
  warn = ETKV_LOG_WARN,
  info = ETKV_LOG_INFO,
  debug = ETKV_LOG_DEBUG,
  trace = ETKV_LOG_TRACE,
};

/// Receives a message, as etkv_log_callback does: on any thread, without
/// calling etkv and without throwing.
using LogCallback = std::function<
    void(LogLevel level, std::string_view target, std::string_view message)>;

namespace detail {
struct LogState {
  std::mutex mutex;
  std::unique_ptr<LogCallback> callback;
};
inline LogState& log_state() {
  // Never destroyed: messages may arrive while the process ends.
  static LogState* state = new LogState;
  return *state;
}
inline void pass_on(
    etkv_log_level level,
    const char* target,
    const char* message,
    void* user) noexcept {
  (*static_cast<const LogCallback*>(user))(
      static_cast<LogLevel>(level), target, message);
}
} // namespace detail

/// Sets the callback that receives the messages that `filter` lets pass. It
/// replaces the earlier callback, which is destroyed before this call returns.
/// An empty callback removes the earlier one. See etkv_set_log_callback for
/// `filter` and the errors.
inline Result<void> set_log_callback(
    const std::string& filter,
    LogCallback callback) {
  auto& state = detail::log_state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  std::unique_ptr<LogCallback> next;
  if (callback) {
    next = std::make_unique<LogCallback>(std::move(callback));
  }
  auto set = detail::run(
      etkv_set_log_callback,
      filter.c_str(),
      next ? detail::pass_on : nullptr,
      next.get());
  if (set.ok()) {
    state.callback = std::move(next);
  }
  return set;
}

// ---- Reports ---------------------------------------------------------------

namespace detail {
/// Calls a C function that stores a string for the caller, and frees the
/// string.
template <typename Function, typename... Arguments>
Result<std::string> ask_string(Function function, Arguments... arguments) {
  return ask<char*>(function, arguments...).transform([](char* raw) {
    std::string text(raw);
    etkv_string_free(raw);
    return text;
  });
}
} // namespace detail

/// Returns a report of a cache, as a JSON object; see etkv_cache_report.
inline Result<std::string> cache_report(const Cache& cache) {
  return detail::ask_string(etkv_cache_report, cache.raw());
}

/// Returns a report of this process, as a JSON object; see etkv_process_report.
inline Result<std::string> process_report() {
  return detail::ask_string(etkv_process_report);
}

/// Returns a description of a program, as a JSON object, from the delegate's
/// payload of `n_bytes` bytes; see etkv_program_describe.
inline Result<std::string> describe_program(
    const uint8_t* payload,
    size_t n_bytes) {
  return detail::ask_string(etkv_program_describe, payload, n_bytes);
}

} // namespace etkv
