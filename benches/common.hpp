// Helpers of the benchmarks: results that must succeed, and medians.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "etkv/result.hpp"

namespace etkv::benches {

/// Prints the error of a failed result, and ends the process.
template <typename T>
void check(const Result<T>& result) {
  if (!result) {
    std::fprintf(stderr, "%s\n", result.error().message().c_str());
    std::exit(1);
  }
}

/// Returns the value of a result, or ends the process with its error.
template <typename T>
T must(Result<T> result) {
  check(result);
  return std::move(result).value();
}

inline void must(const Result<void>& result) {
  check(result);
}

/// Returns the median of at least one number; for an even count, the upper one.
inline double median(std::vector<double> numbers) {
  const auto middle =
      numbers.begin() + static_cast<std::ptrdiff_t>(numbers.size() / 2);
  std::nth_element(numbers.begin(), middle, numbers.end());
  return *middle;
}

} // namespace etkv::benches
