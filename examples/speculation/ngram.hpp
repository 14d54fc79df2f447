// Draft tokens from the text itself: what followed the last few ids when they were
// there before.
#pragma once

#include <cstdint>
#include <vector>

#include "examples/speculation/draft.hpp"

namespace etkv::examples {

class NgramDraft : public Draft {
 public:
  /// Needs no second model, and no random numbers: what it proposes is chosen.
  ///
  /// Every earlier place whose last ids are those of the text proposes what came
  /// behind it. The longer the likeness the more it counts, and of alike places
  /// the later one. Each level has the candidates that count most.
  Result<TokenTree> propose(
      const std::vector<int64_t>& text,
      const TreeShape& shape,
      Sampler& sampler) override;

  Result<void> commit(const std::vector<int32_t>&) override {
    return {};
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
