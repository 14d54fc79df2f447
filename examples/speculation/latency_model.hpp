// The seconds of a forward, by the number of its tokens.
#pragma once

#include <cstddef>
#include <map>

namespace etkv::examples {

/// Running means of seconds, with linear interpolation between measured numbers
/// of tokens. The last line continues.
///
/// The first forward of a number of tokens also creates kernels and buffers.
/// The next few may be slow too, as at the start of a process. So the shortest
/// of the first few counts.
class LatencyModel {
 public:
  void add(size_t tokens, double seconds);

  /// Returns the seconds for this many tokens; 0 without measurements.
  double at(double tokens) const;

 private:
  struct Mean {
    double seconds;
    /// The forwards that it measures.
    int forwards;

    /// Whether it measures forwards after the first.
    bool settled() const {
      return forwards > 1;
    }
  };
  std::map<size_t, Mean> means_;
};

} // namespace etkv::examples
