// The log of etkv for C++17. See log.h for the messages and the threads.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "etkv/detail.hpp"
#include "etkv/log.h"
#include "etkv/result.hpp"

namespace etkv {

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
/// An empty one removes it. See etkv_set_log_callback for `filter` and the
/// errors.
inline Result<void> set_log_callback(
    const std::string& filter,
    LogCallback callback) {
  auto& state = detail::log_state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  std::unique_ptr<LogCallback> next;
  if (callback) {
    next = std::make_unique<LogCallback>(std::move(callback));
  }
  auto set = detail::run([&](etkv_error** error) {
    return etkv_set_log_callback(
        filter.c_str(), next ? detail::pass_on : nullptr, next.get(), error);
  });
  if (set.ok()) {
    state.callback = std::move(next);
  }
  return set;
}

} // namespace etkv
