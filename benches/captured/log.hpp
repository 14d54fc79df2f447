// Counts captured steps by etkv's log.
#pragma once

#include <cstddef>
#include <mutex>
#include <set>
#include <string>
#include <string_view>

#include "benches/common.hpp"
#include "etkv/etkv.hpp"

namespace etkv::benches {

/// Counts captured and interpreted steps, and stores why steps were not
/// captured.
class Log {
 public:
  Log() {
    must(set_log_callback(
        "etkv::program=debug",
        [this](LogLevel, std::string_view, std::string_view message) {
          take(message);
        }));
  }
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;
  ~Log() {
    must(set_log_callback("off", nullptr));
  }

  /// The number of captures: a step counts again if it is captured again
  /// because an address has changed.
  size_t captured() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return captured_;
  }

  /// The number of steps of few tokens that the interpreter ran instead.
  size_t interpreted() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return interpreted_;
  }

  /// Reasons why steps were not captured.
  std::set<std::string> reasons() const {
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
    } else if (has("the interpreter runs a step")) {
      ++interpreted_;
      reasons_.emplace(message);
    } else if (has("not captured") || has("no step is captured")) {
      reasons_.emplace(message);
    }
  }

  mutable std::mutex mutex_;
  size_t captured_ = 0;
  size_t interpreted_ = 0;
  std::set<std::string> reasons_;
};

} // namespace etkv::benches
