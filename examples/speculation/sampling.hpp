// Distributions over a vocabulary: draws ids, and accepts ids that were drawn
// from another distribution.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "examples/common/logits.hpp"

namespace etkv::examples {

/// Probabilities, one for each id, that sum to 1.
using Distribution = std::vector<float>;

/// Random numbers that depend only on the seed, not on the machine.
class Rng {
 public:
  explicit Rng(uint64_t seed) : bits_(seed) {}

  /// Returns a number from 0 up to, but not including, 1.
  double uniform() {
    return static_cast<double>(bits_() >> 11) * 0x1p-53;
  }

 private:
  std::mt19937_64 bits_;
};

/// Chooses ids from logits.
struct Sampler {
  explicit Sampler(double temperature = 0.0, uint64_t seed = 0)
      : temperature(temperature), rng(seed) {}

  /// Returns whether the greatest logit is chosen without drawing.
  bool greedy() const {
    return temperature == 0.0;
  }
  /// Returns the next id for a row of logits.
  Result<int64_t> choose(const LogitsView& logits, int64_t row);

  double temperature;
  Rng rng;
};

/// Returns the softmax of a row divided by a temperature above 0. NaN and
/// +infinity are errors, and so is a row of only -infinity.
Result<Distribution>
softmax(const LogitsView& logits, int64_t row, double temperature);

/// Draws an id by its probability. An id of probability 0 is never drawn.
int64_t draw(const Distribution& p, Rng& rng);

/// Removes an id from a distribution, and scales the rest to 1; false if
/// nothing is left (all are 0).
bool remove(Distribution& p, int64_t id);

/// Decides whether an id drawn from `q` is accepted as an id drawn from `p`,
/// with probability min(1, p/q). If the id is rejected, `p` becomes the
/// distribution to draw from instead: the positive part of p - q, scaled to 1.
/// An empty `q` means that the id was chosen without drawing.
///
/// For any `q`, the resulting id (accepted, or drawn from the new `p`) has the
/// distribution of the original `p`.
bool accept(Distribution& p, const Distribution& q, int64_t id, Rng& rng);

} // namespace etkv::examples
