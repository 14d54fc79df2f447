// What proposes how a text goes on.
#pragma once

#include <cstdint>
#include <vector>

#include "etkv/etkv.hpp"
#include "examples/common/hidden_states.hpp"
#include "examples/speculation/sampling.hpp"
#include "examples/speculation/tree.hpp"

namespace etkv::examples {

class Draft {
 public:
  virtual ~Draft() = default;

  /// Grows a tree behind `text`, whose last id is the root. The text need not go
  /// on from the one before.
  virtual Result<TokenTree> propose(
      const std::vector<int64_t>& text,
      const TreeShape& shape,
      Sampler& sampler) = 0;

  /// A chain of the last tree has become text, the root first.
  virtual Result<void> commit(const std::vector<int32_t>& accepted) = 0;

  /// Hears of the target's hidden states, where it gives any: a row for each position
  /// from this one on, of prompts and of what was accepted. What was said of these
  /// positions before, and of all behind them, is no longer so.
  virtual void saw(int64_t, const HiddenStatesView&) {}

  /// Seconds that a tree of this shape takes, as far as that is known.
  virtual double seconds(int64_t depth, int64_t width) const = 0;
};

} // namespace etkv::examples
