// A tree of candidates after a text, and its verification.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "etkv/etkv.hpp"
#include "examples/common/logits.hpp"
#include "examples/speculation/sampling.hpp"

namespace etkv::examples {

/// The nodes in the order in which they were added, each after its parent. Node
/// 0 is the root: the last id of the text, which is not a candidate.
struct TokenTree {
  explicit TokenTree(int64_t root) {
    add(root, -1);
  }

  /// Adds a node, and returns its number. Children of one node are different.
  int32_t add(int64_t token, int32_t parent) {
    tokens.push_back(token);
    parents.push_back(parent);
    depths.push_back(parent < 0 ? 0 : depths[static_cast<size_t>(parent)] + 1);
    drawn_from.emplace_back();
    return static_cast<int32_t>(tokens.size()) - 1;
  }

  size_t size() const {
    return tokens.size();
  }

  /// Returns the position of each node, with the root at `base`.
  std::vector<int64_t> positions(int64_t base) const {
    std::vector<int64_t> found;
    for (const int32_t depth : depths) {
      found.push_back(base + depth);
    }
    return found;
  }

  /// Returns the children of a node, in the order in which they were added.
  std::vector<int32_t> children(int32_t node) const {
    std::vector<int32_t> found;
    for (size_t i = 0; i < size(); ++i) {
      if (parents[i] == node) {
        found.push_back(static_cast<int32_t>(i));
      }
    }
    return found;
  }

  std::vector<int64_t> tokens;
  std::vector<int32_t> parents;
  std::vector<int32_t> depths;
  /// The distribution from which a node's children were drawn, without
  /// replacement; empty if they were chosen without drawing.
  std::vector<Distribution> drawn_from;
};

/// The limits of a tree.
struct TreeShape {
  /// Levels below the root, and nodes per level.
  int64_t depth = 0;
  int64_t width = 0;
  /// The maximum nodes of the tree, including the root; at least 1.
  size_t most = 1;
};

/// The result of verifying a tree.
struct VerificationResult {
  /// The accepted chain, the root first.
  std::vector<int32_t> accepted;
  /// The model's choice after the chain.
  int64_t next = 0;
};

/// Walks down from the root while the model accepts a child. `logits` have a
/// row for each node.
///
/// Greedy verification accepts the child that is the argmax after its parent,
/// so the text is the same as without the tree. Otherwise children are tried in
/// order with accept(), so every id of the text has the probability that the
/// model assigns to it.
Result<VerificationResult>
verify(const TokenTree& tree, const LogitsView& logits, Sampler& sampler);

/// Does the same for greedy verification. Instead of logits it takes the argmax
/// after each node.
Result<VerificationResult> verify(
    const TokenTree& tree,
    const std::vector<int64_t>& chosen);

} // namespace etkv::examples
