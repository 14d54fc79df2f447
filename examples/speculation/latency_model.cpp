#include "examples/speculation/latency_model.hpp"

#include <algorithm>

namespace etkv::examples {

void LatencyModel::add(size_t tokens, double seconds) {
  // The machine's speed changes, so new measurements count more than old ones.
  constexpr double kNew = 0.25;
  // If the cache grows, a forward takes several times as long. Without a cap,
  // such a measurement could prevent further forwards of that many tokens, and
  // only these would correct the mean.
  constexpr double kMax = 1.5;
  // The number of first forwards. Only the shortest of them counts.
  constexpr int kEarly = 4;
  const auto entry = means_.try_emplace(tokens, Mean{seconds, 0}).first;
  Mean& mean = entry->second;
  ++mean.forwards;
  if (mean.forwards <= kEarly) {
    mean.seconds = std::min(mean.seconds, seconds);
  } else {
    const double counted = std::min(seconds, kMax * mean.seconds);
    mean.seconds += kNew * (counted - mean.seconds);
  }
}

double LatencyModel::at(double tokens) const {
  // A line needs two points.
  const bool settled =
      std::count_if(means_.begin(), means_.end(), [](const auto& entry) {
        return entry.second.settled();
      }) >= 2;
  // The last two points so far: tokens and seconds.
  double x0 = 0.0;
  double y0 = 0.0;
  double x1 = 0.0;
  double y1 = 0.0;
  for (const auto& [n, mean] : means_) {
    if (settled && !mean.settled()) {
      continue;
    }
    const bool first = x1 == 0.0;
    x0 = x1;
    y0 = first ? mean.seconds : y1;
    x1 = static_cast<double>(n);
    y1 = std::max(y0, mean.seconds);
    if (tokens <= x1) {
      // Before the first point the seconds are constant.
      return first ? y1 : y0 + (y1 - y0) * (tokens - x0) / (x1 - x0);
    }
  }
  // With a single point the line is horizontal.
  return x1 == 0.0 ? 0.0 : y0 + (y1 - y0) * (tokens - x0) / (x1 - x0);
}

} // namespace etkv::examples
