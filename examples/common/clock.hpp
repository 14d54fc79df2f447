// The time and the memory of a run.
#pragma once

#include <chrono>
#include <cstdint>

#include "etkv/etkv.h"

namespace etkv::examples {

/// Measures the seconds since construction or the last lap.
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

/// Returns the bytes of memory that the process holds now; 0 if the system does
/// not report them.
uint64_t memory_bytes();

/// Returns the peak bytes of memory of the process; 0 if the system does not
/// report them.
uint64_t peak_memory_bytes();

/// Returns the bytes that MLX holds now, and their peak; zeros in a build
/// without MLX.
etkv_mlx_memory mlx_memory();

} // namespace etkv::examples
