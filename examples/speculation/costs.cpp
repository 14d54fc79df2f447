#include "examples/speculation/costs.hpp"

#include <algorithm>
#include <iterator>

namespace etkv::examples {

void Costs::add(size_t tokens, double seconds) {
  // The machine changes its mind: what is new counts more than what is old.
  constexpr double kNew = 0.25;
  const auto [entry, first] = seconds_.try_emplace(tokens, seconds);
  if (!first) {
    entry->second += kNew * (seconds - entry->second);
  }
}

double Costs::at(double tokens) const {
  if (seconds_.empty()) {
    return 0.0;
  }
  if (seconds_.size() == 1) {
    return seconds_.begin()->second;
  }
  // The two measured numbers around it, or the last two before it.
  auto above = std::find_if(
      std::next(seconds_.begin()), seconds_.end(), [&](const auto& entry) {
        return static_cast<double>(entry.first) >= tokens;
      });
  if (above == seconds_.end()) {
    above = std::prev(above);
  }
  const auto below = std::prev(above);
  const auto x0 = static_cast<double>(below->first);
  const auto x1 = static_cast<double>(above->first);
  const double slope = (above->second - below->second) / (x1 - x0);
  // More tokens never take less, whatever one measurement says.
  return below->second + std::max(0.0, slope) * (tokens - x0);
}

} // namespace etkv::examples
