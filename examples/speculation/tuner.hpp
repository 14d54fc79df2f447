// Chooses the depth and width of trees, by their cost and the number of
// accepted ids.
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
  /// The limits of the search. Fixed values may exceed them.
  static constexpr int64_t kDeepest = 6;
  static constexpr int64_t kWidest = 8;

  /// Tunes the values that are not set.
  Tuner(std::optional<int64_t> depth, std::optional<int64_t> width)
      : depth_(depth), width_(width) {}

  /// The seconds of a draft for a tree of this depth and width.
  using DraftSeconds = std::function<double(int64_t depth, int64_t width)>;

  /// Returns the shape with the most expected ids per second. Depth 0 means no
  /// tree. The tuner then tries a tree from time to time, because a text may
  /// become easier. The longer the draft of a trial takes, the rarer trials
  /// are, including the first. The first trials are chains, because more
  /// candidates per level cost more.
  TreeShape next(const DraftSeconds& draft_seconds);

  /// Records the result of a tree, and the seconds of its verification and of its
  /// draft.
  void observe(
      const TreeShape& asked,
      const TokenTree& tree,
      const VerificationResult& verified,
      double seconds,
      double draft_seconds);

  /// Returns the probability that one of `width` candidates is accepted, given
  /// that their parent is accepted.
  double acceptance(int64_t width) const;

 private:
  /// Acceptance statistics of candidates.
  struct Rank {
    double tried = 0.0;
    double accepted = 0.0;

    /// Counts an observation, and scales earlier ones by `fade`.
    void add(bool is_accepted, double fade) {
      tried = fade * tried + 1.0;
      accepted = fade * accepted + (is_accepted ? 1.0 : 0.0);
    }
    /// Returns the share that was accepted. The share `assumed` counts as
    /// `many` observations.
    double share(double assumed, double many) const {
      return (accepted + many * assumed) / (tried + many);
    }
  };
  /// Returns the number of steps without a tree after which a tree is tried.
  /// For the first trials, the time of their drafts is estimated.
  double patience(double first_draft_seconds) const;
  double promise(int64_t depth, int64_t width, const DraftSeconds& draft) const;

  std::optional<int64_t> depth_;
  std::optional<int64_t> width_;
  LatencyModel verification_;
  /// Acceptance by the rank of a candidate among its siblings.
  std::array<Rank, kWidest> ranks_;
  /// Recent acceptance of first candidates. It is separate because a text may
  /// become harder from one token to the next.
  Rank late_;
  /// The mean ratio of a tree's number of nodes to the maximum of its shape,
  /// over trees that are not empty.
  double filled_ = 1.0;
  /// The numbers of steps without a tree, of steps with a tree, of steps since
  /// the last tree, and of steps since the last step without a tree.
  int64_t singles_ = 0;
  int64_t trees_ = 0;
  int64_t without_ = 0;
  int64_t behind_ = 0;
  /// The seconds of the draft in the last trial, including the time to read the
  /// text since the previous trial.
  double trial_seconds_ = 0.0;
  /// Whether the next tree is a trial after a long time without trees.
  bool is_trial_ = false;
};

} // namespace etkv::examples
