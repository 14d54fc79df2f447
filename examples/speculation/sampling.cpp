#include "examples/speculation/sampling.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "examples/common/try.hpp"

namespace etkv::examples {
namespace {

/// Scales the values to a sum of 1; false if all values are 0.
bool normalize(Distribution& p) {
  double sum = 0.0;
  for (const float value : p) {
    sum += static_cast<double>(value);
  }
  if (!(sum > 0.0)) {
    return false;
  }
  for (float& value : p) {
    value = static_cast<float>(static_cast<double>(value) / sum);
  }
  return true;
}

/// Returns the index of the greatest value, or of the first NaN.
size_t largest(const std::vector<float>& values) {
  size_t at = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i])) {
      return i;
    }
    at = values[i] > values[at] ? i : at;
  }
  return at;
}

} // namespace

Result<int64_t> Sampler::choose(const LogitsView& logits, int64_t row) {
  if (greedy()) {
    return argmax(logits, row);
  }
  ASSIGN_OR_RETURN(const auto p, softmax(logits, row, temperature));
  return draw(p, rng);
}

Result<Distribution>
softmax(const LogitsView& logits, int64_t row, double temperature) {
  Distribution p(static_cast<size_t>(logits.vocabulary));
  copy_row(logits, row, p.data());
  const auto id = largest(p);
  const double best = p[id];
  if (!std::isfinite(best)) {
    return Error(
        ETKV_ERROR_PROGRAM,
        "row " + std::to_string(row) +
            " of the program's logits has no softmax: logit " +
            std::to_string(id) + " is " +
            (std::isnan(best) ? "nan" : std::to_string(best)));
  }
  // Computing in float32 is much faster, and the result is rounded to float32
  // anyway.
  for (float& value : p) {
    value = std::exp(
        static_cast<float>((static_cast<double>(value) - best) / temperature));
  }
  normalize(p);
  return p;
}

int64_t draw(const Distribution& p, Rng& rng) {
  double sum = 0.0;
  for (const float value : p) {
    sum += static_cast<double>(value);
  }
  // Scale by the sum. The sum is 1 except for rounding, and rounding must not
  // make the last id likelier.
  double left = rng.uniform() * sum;
  int64_t last = 0;
  for (size_t id = 0; id < p.size(); ++id) {
    if (p[id] > 0.0F) {
      last = static_cast<int64_t>(id);
      left -= static_cast<double>(p[id]);
      if (left < 0.0) {
        break;
      }
    }
  }
  return last;
}

bool remove(Distribution& p, int64_t id) {
  p[static_cast<size_t>(id)] = 0.0F;
  return normalize(p);
}

bool accept(Distribution& p, const Distribution& q, int64_t id, Rng& rng) {
  const auto at = static_cast<size_t>(id);
  const double wanted = p[at];
  const double offered = q.empty() ? 1.0 : static_cast<double>(q[at]);
  if (rng.uniform() * offered < wanted) {
    return true;
  }
  if (q.empty()) {
    // If all other ids have probability 0, the rejection is a rounding error:
    // keep the id.
    const float before = p[at];
    if (!remove(p, id)) {
      p[at] = before;
      return true;
    }
    return false;
  }
  Distribution rest(p.size());
  for (size_t i = 0; i < p.size(); ++i) {
    rest[i] = std::max(0.0F, p[i] - q[i]);
  }
  // The distributions are equal except for rounding, so there is nothing to
  // draw from.
  if (!normalize(rest)) {
    return true;
  }
  p = std::move(rest);
  return false;
}

} // namespace etkv::examples
