// Draft tokens from the text itself: the ids that followed an earlier
// occurrence of the last few ids.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "examples/speculation/draft.hpp"

namespace etkv::examples {

class NgramDraft : public Draft {
 public:
  /// Needs no second model and no random numbers: the choice is deterministic.
  ///
  /// Every earlier occurrence of the last ids proposes the ids after it. Longer
  /// matches have more weight. Among matches of equal length, later ones have
  /// more weight. Each level has the candidates with the most weight.
  Result<TokenTree> propose(
      const std::vector<int64_t>& text,
      const TreeShape& shape,
      Sampler& sampler) override;

  Result<void> commit(const std::vector<int32_t>&) override {
    return {};
  }

  /// Returns 1, a chain: if the best match is wrong, other matches are seldom
  /// right, and each id of a step has a cost.
  std::optional<int64_t> width() const override {
    return 1;
  }

  double seconds(int64_t, int64_t) const override {
    return 0.0;
  }

  /// Returns the tree that propose() returns.
  static TokenTree grow(
      const std::vector<int64_t>& text,
      const TreeShape& shape);
};

} // namespace etkv::examples
