// The seconds of a forward, by the number of its tokens.
#pragma once

#include <cstddef>
#include <map>

namespace etkv::examples {

/// Running means of seconds, interpolated linearly between measured numbers of
/// tokens, and extrapolated beyond the largest.
///
/// The first forward with a given number of tokens also creates kernels and
/// buffers. The next few forwards may be slow too, as at the start of a
/// process. So only the shortest of the first few forwards counts.
class LatencyModel {
 public:
  void add(size_t tokens, double seconds);

  /// Returns the seconds for this many tokens; 0 without measurements.
  double at(double tokens) const;

 private:
  struct Mean {
    double seconds;
    /// The number of measured forwards.
    int forwards;

    /// Returns whether any forward after the first has been measured.
    bool settled() const {
      return forwards > 1;
    }
  };
  std::map<size_t, Mean> means_;
};

} // namespace etkv::examples
