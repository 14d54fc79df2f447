// Time and memory that a run takes.
#pragma once

#include <chrono>
#include <cstdint>

namespace etkv::examples {

/// Seconds since it was made, or since the last lap.
class Stopwatch {
 public:
  double lap() {
    const auto now = Clock::now();
    const std::chrono::duration<double> passed = now - since_;
    since_ = now;
    return passed.count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point since_ = Clock::now();
};

/// The memory that the process holds now, in bytes; 0 where the system does not
/// tell.
uint64_t memory_bytes();

/// The most memory that the process has held so far, in bytes; 0 where the
/// system does not tell.
uint64_t peak_memory_bytes();

} // namespace etkv::examples
