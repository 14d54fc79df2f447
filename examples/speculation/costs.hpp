// What a forward takes, by the number of its tokens.
#pragma once

#include <cstddef>
#include <map>

namespace etkv::examples {

/// Running means of seconds. More tokens never take less, whatever one measurement
/// says: a mean that is below one of fewer tokens counts as that. Between the
/// numbers that were measured it is a line, beyond the last one the line goes on,
/// and below the first one it is level.
class Costs {
 public:
  void add(size_t tokens, double seconds);

  /// Seconds for so many tokens; 0 where nothing was measured.
  double at(double tokens) const;

  bool empty() const {
    return seconds_.empty();
  }

 private:
  std::map<size_t, double> seconds_;
};

} // namespace etkv::examples
