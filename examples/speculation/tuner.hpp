// Chooses the depth and width of a tree, by the cost of trees and the ids they bring.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>

#include "examples/speculation/latency_model.hpp"
#include "examples/speculation/tree.hpp"

namespace etkv::examples {

class Tuner {
 public:
  /// As far as it looks for itself; what is given may go further.
  static constexpr int64_t kDeepest = 6;
  static constexpr int64_t kWidest = 8;

  /// What is not given is tuned.
  Tuner(std::optional<int64_t> depth, std::optional<int64_t> width)
      : depth_(depth), width_(width) {}

  /// Seconds of a draft for a tree of this depth and width.
  using DraftSeconds = std::function<double(int64_t depth, int64_t width)>;

  /// The shape that promises most ids a second. Depth 0 is no tree at all; then
  /// one is tried every now and then, as a text may become easier.
  TreeShape next(const DraftSeconds& draft_seconds);

  /// What came of a tree, and what its verification took.
  void observe(
      const TreeShape& asked,
      const TokenTree& tree,
      const VerificationResult& verified,
      double seconds);

  /// The probability that one of `width` candidates is accepted, where there are
  /// any and their parent is.
  double acceptance(int64_t width) const;

 private:
  struct Rank {
    double tried = 0.0;
    double accepted = 0.0;
  };
  double promise(int64_t depth, int64_t width, const DraftSeconds& draft) const;

  std::optional<int64_t> depth_;
  std::optional<int64_t> width_;
  LatencyModel verification_;
  /// By the place of a candidate among its siblings.
  std::array<Rank, kWidest> ranks_;
  /// Nodes that trees have, where they have any, of those that they may have.
  double filled_ = 1.0;
  /// Steps without a tree and with one, and those since the last tree.
  int64_t singles_ = 0;
  int64_t trees_ = 0;
  int64_t without_ = 0;
};

} // namespace etkv::examples
