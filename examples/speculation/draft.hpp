// The interface of drafts, which propose how a text continues.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "etkv/etkv.hpp"
#include "examples/common/hidden_states.hpp"
#include "examples/speculation/sampling.hpp"
#include "examples/speculation/tree.hpp"

namespace etkv::examples {

class Draft {
 public:
  virtual ~Draft() = default;

  /// Returns a tree after `text`, whose last id is the root. The text need not
  /// continue the text of the last call.
  virtual Result<TokenTree> propose(
      const std::vector<int64_t>& text,
      const TreeShape& shape,
      Sampler& sampler) = 0;

  /// Called with the accepted chain of the last tree, the root first.
  virtual Result<void> commit(const std::vector<int32_t>& accepted) = 0;

  /// Called with the target's hidden states, if the target returns any: a row
  /// for each position of a prompt or of accepted ids. The first argument is
  /// the position of the first row. These rows replace the rows that were
  /// reported before for this position and later ones.
  virtual void saw(int64_t, const HiddenStatesView&) {}

  /// Returns the best width of trees, if it is known for this draft. Otherwise
  /// widths are tried.
  virtual std::optional<int64_t> width() const {
    return std::nullopt;
  }

  /// Returns the estimated seconds that the draft needs for a tree of this
  /// shape.
  virtual double seconds(int64_t depth, int64_t width) const = 0;
};

} // namespace etkv::examples
