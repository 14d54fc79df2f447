#include "examples/speculation/costs.hpp"

#include <algorithm>

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
  // The line's last two points so far: their numbers of tokens and seconds.
  double x0 = 0.0;
  double y0 = 0.0;
  double x1 = 0.0;
  double y1 = 0.0;
  for (const auto& [n, seconds] : seconds_) {
    const bool first = x1 == 0.0;
    x0 = x1;
    y0 = first ? seconds : y1;
    x1 = static_cast<double>(n);
    y1 = std::max(y0, seconds);
    if (tokens <= x1) {
      // Below the first, no line is known.
      return first ? y1 : y0 + (y1 - y0) * (tokens - x0) / (x1 - x0);
    }
  }
  // With a single point the line is level, too.
  return x1 == 0.0 ? 0.0 : y0 + (y1 - y0) * (tokens - x0) / (x1 - x0);
}

} // namespace etkv::examples
