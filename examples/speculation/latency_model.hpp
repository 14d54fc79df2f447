// What a forward takes, by the number of its tokens.
#pragma once

#include <cstddef>
#include <map>

namespace etkv::examples {

/// Running means of seconds. Between the numbers that were measured it is a line,
/// and beyond the last one the line goes on.
///
/// The first forward of a number of tokens also makes what all later ones use, such
/// as kernels and buffers: it counts as long as there is little else to go by.
class LatencyModel {
 public:
  void add(size_t tokens, double seconds);

  /// Seconds for so many tokens; 0 where nothing was measured.
  double at(double tokens) const;

 private:
  struct Mean {
    double seconds;
    /// Whether it is of forwards after the first.
    bool settled;
  };
  std::map<size_t, Mean> means_;
};

} // namespace etkv::examples
