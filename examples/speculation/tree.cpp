#include "examples/speculation/tree.hpp"

#include <string>
#include <utility>

#include "examples/common/try.hpp"

namespace etkv::examples {
namespace {

using Children = std::vector<int32_t>;

/// The accepted child of a node; or -1, and the id to continue with.
struct Choice {
  int32_t child;
  int64_t next;
};

/// Walks from the root to the last accepted node. `choose` chooses a child of a
/// node.
template <typename Choose>
Result<VerificationResult> walk(const TokenTree& tree, const Choose& choose) {
  VerificationResult verified;
  for (int32_t node = 0; node >= 0;) {
    verified.accepted.push_back(node);
    ASSIGN_OR_RETURN(const Choice choice, choose(node, tree.children(node)));
    node = choice.child;
    verified.next = choice.next;
  }
  return verified;
}

Choice
choose_greedily(const TokenTree& tree, const Children& children, int64_t best) {
  for (const int32_t child : children) {
    if (tree.tokens[static_cast<size_t>(child)] == best) {
      return {child, best};
    }
  }
  return {-1, best};
}

Choice draw_choice(
    const TokenTree& tree,
    int32_t node,
    const Children& children,
    Distribution p,
    Rng& rng) {
  Distribution q = tree.drawn_from[static_cast<size_t>(node)];
  for (const int32_t child : children) {
    const int64_t token = tree.tokens[static_cast<size_t>(child)];
    if (accept(p, q, token, rng)) {
      return {child, token};
    }
    // The next child was drawn from a distribution without this child.
    if (!q.empty()) {
      remove(q, token);
    }
  }
  return {-1, draw(p, rng)};
}

} // namespace

Result<VerificationResult>
verify(const TokenTree& tree, const LogitsView& logits, Sampler& sampler) {
  RETURN_IF_ERROR(check_rows(logits, tree.size()));
  return walk(
      tree, [&](int32_t node, const Children& children) -> Result<Choice> {
        if (sampler.greedy()) {
          ASSIGN_OR_RETURN(const int64_t best, argmax(logits, node));
          return choose_greedily(tree, children, best);
        }
        ASSIGN_OR_RETURN(auto p, softmax(logits, node, sampler.temperature));
        return draw_choice(tree, node, children, std::move(p), sampler.rng);
      });
}

Result<VerificationResult> verify(
    const TokenTree& tree,
    const std::vector<int64_t>& chosen) {
  if (chosen.size() != tree.size()) {
    return Error(
        ETKV_ERROR_SHAPE,
        std::to_string(chosen.size()) + " chosen ids for a tree of " +
            std::to_string(tree.size()));
  }
  return walk(
      tree, [&](int32_t node, const Children& children) -> Result<Choice> {
        const int64_t best = chosen[static_cast<size_t>(node)];
        return choose_greedily(tree, children, best);
      });
}

} // namespace etkv::examples
