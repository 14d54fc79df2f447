// Draft tokens from the text itself: the ids that followed the last few ids
// earlier.
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
  /// Every earlier place with the same last ids proposes the ids after it. A
  /// longer match counts more, and of equal matches the later one. Each level
  /// has the candidates that count most.
  Result<TokenTree> propose(
      const std::vector<int64_t>& text,
      const TreeShape& shape,
      Sampler& sampler) override;

  Result<void> commit(const std::vector<int32_t>&) override {
    return {};
  }

  /// A chain: if the best place is wrong, other places are seldom right, and
  /// each id of a step has a cost.
  std::optional<int64_t> width() const override {
    return 1;
  }

  double seconds(int64_t, int64_t) const override {
    return 0.0;
  }

  /// The tree itself.
  static TokenTree grow(
      const std::vector<int64_t>& text,
      const TreeShape& shape);
};

} // namespace etkv::examples
