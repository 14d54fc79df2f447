#include "examples/speculation/program_draft.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "examples/common/clock.hpp"
#include "examples/common/interrupt.hpp"
#include "examples/common/shared_prefix.hpp"
#include "examples/common/try.hpp"
#include "examples/common/warm_up.hpp"

namespace etkv::examples {
namespace {

/// A node that can have children: the distribution of the children, and the
/// probability of the path to the node.
struct Leaf {
  int32_t node;
  Distribution q;
  double log_probability;
};

/// A possible child.
struct Child {
  size_t leaf;
  int64_t token;
  double log_probability;
};

/// Returns the `n` likeliest ids, likeliest first.
std::vector<int64_t> likeliest_ids(const Distribution& q, size_t n) {
  std::vector<int64_t> ids;
  const auto likelier = [&](int64_t a, int64_t b) {
    return q[static_cast<size_t>(a)] > q[static_cast<size_t>(b)];
  };
  for (size_t i = 0; i < q.size() && n > 0; ++i) {
    const auto id = static_cast<int64_t>(i);
    if (!(q[i] > 0.0F) || (ids.size() == n && !likelier(id, ids.back()))) {
      continue;
    }
    // `n` is small, so insertion into a sorted list is fast.
    ids.insert(std::upper_bound(ids.begin(), ids.end(), id, likelier), id);
    ids.resize(std::min(ids.size(), n));
  }
  return ids;
}

/// Returns the `n` likeliest children of all leaves, likeliest first. The first
/// one is always the likeliest child of the first leaf, so the chain of
/// likeliest ids is in the tree.
std::vector<Child> likeliest(const std::vector<Leaf>& leaves, size_t n) {
  std::vector<Child> all;
  for (size_t leaf = 0; leaf < leaves.size(); ++leaf) {
    const auto& [node, q, log_probability] = leaves[leaf];
    for (const int64_t id : likeliest_ids(q, n)) {
      const double likelihood = q[static_cast<size_t>(id)];
      all.push_back({leaf, id, log_probability + std::log(likelihood)});
    }
  }
  if (!all.empty()) {
    std::stable_sort(
        all.begin() + 1, all.end(), [](const auto& a, const auto& b) {
          return a.log_probability > b.log_probability;
        });
  }
  all.resize(std::min(n, all.size()));
  return all;
}

/// Replaces the likeliest ids of each leaf by drawn ids. The number of ids
/// stays the same, so that it does not depend on which ids are drawn.
std::vector<Child> drawn(
    const std::vector<Leaf>& leaves,
    const std::vector<Child>& chosen,
    Rng& rng) {
  std::vector<Child> all;
  for (size_t leaf = 0; leaf < leaves.size(); ++leaf) {
    Distribution left = leaves[leaf].q;
    for (const auto& candidate : chosen) {
      if (candidate.leaf != leaf) {
        continue;
      }
      const int64_t token = draw(left, rng);
      const double q = leaves[leaf].q[static_cast<size_t>(token)];
      all.push_back({leaf, token, leaves[leaf].log_probability + std::log(q)});
      if (!remove(left, token)) {
        break;
      }
    }
  }
  return all;
}

} // namespace

Error of_draft(const Error& error) {
  return Error(error.status(), "the draft: " + error.message());
}

Result<CacheSession<TreeCache>> ProgramDraft::make_session(
    Program& program,
    const DraftTarget& target) {
  if (program.vocabulary() != target.vocabulary) {
    return Error(
        ETKV_ERROR_PROGRAM,
        "it has a vocabulary of " + std::to_string(program.vocabulary()) +
            " ids, and the model one of " + std::to_string(target.vocabulary));
  }
  // A program that reports no context length gets the context length of the
  // target.
  const int32_t context = program.params().max_context_length;
  const int32_t capacity =
      context > 0 ? std::min(target.capacity, context) : target.capacity;
  ASSIGN_OR_RETURN(
      auto session,
      make_tree_session(
          program.params().backend_id,
          make_config(
              program.params(),
              capacity,
              target.kv_format.value_or(program.native_format()))));
  RETURN_IF_ERROR(load_warm(program, session, Logits::proposed));
  return session;
}

Result<void> ProgramDraft::measure() {
  constexpr int kTimes = 3;
  for (int time = 0; time < kTimes; ++time) {
    Stopwatch watch;
    ASSIGN_OR_RETURN(const auto logits, run_text({0}, 0, 1));
    latency_.add(1, watch.lap());
    RETURN_IF_ERROR(argmax(logits, logits.last_row()));
    choosing_one_.add(1, watch.lap());
    for (const size_t nodes : {1, 4}) {
      std::vector<Leaf> leaves(nodes);
      for (Leaf& leaf : leaves) {
        ASSIGN_OR_RETURN(leaf.q, softmax(logits, logits.last_row(), 1.0));
      }
      likeliest(leaves, nodes);
      choosing_.add(nodes, watch.lap());
    }
    RETURN_IF_ERROR(cache().rewind(0));
  }
  return {};
}

Result<TokenTree> ProgramDraft::propose(
    const std::vector<int64_t>& text,
    const TreeShape& shape,
    Sampler& sampler) {
  auto tree = grow(text, shape, sampler);
  return tree.ok() ? std::move(tree) : of_draft(tree.error());
}

Result<TokenTree> ProgramDraft::grow(
    const std::vector<int64_t>& text,
    const TreeShape& shape,
    Sampler& sampler) {
  // If the result of the last tree was not reported, nothing was accepted.
  RETURN_IF_ERROR(keep({}));
  greedy_ = sampler.greedy();
  TokenTree tree(text.back());
  const auto room = static_cast<int64_t>(cache().capacity());
  if (shape.depth == 0 || static_cast<int64_t>(text.size()) > room) {
    return tree;
  }
  // Greedy decoding has no temperature. Any temperature keeps the order of ids.
  const double temperature = sampler.greedy() ? 1.0 : sampler.temperature;
  ASSIGN_OR_RETURN(const auto read_logits, read(text));
  if (!read_logits) {
    return tree;
  }
  LogitsView logits = *read_logits;
  if (sampler.greedy() && shape.width == 1) {
    return grow_chain(std::move(tree), logits, shape);
  }
  Stopwatch watch;
  std::vector<Leaf> leaves = {{0, {}, 0.0}};
  ASSIGN_OR_RETURN(
      leaves[0].q, softmax(logits, logits.last_row(), temperature));
  const auto widest = static_cast<size_t>(
      std::min<int64_t>(shape.width, program_.params().prefill_chunk_size));
  for (int64_t level = 1;; ++level) {
    const size_t left = std::min(shape.most - tree.size(), widest);
    auto children = likeliest(leaves, left);
    if (!sampler.greedy()) {
      children = drawn(leaves, children, sampler.rng);
    }
    choosing_.add(leaves.size(), watch.lap());
    std::vector<Leaf> next;
    for (const auto& child : children) {
      next.push_back(
          {tree.add(child.token, leaves[child.leaf].node),
           {},
           child.log_probability});
    }
    if (!sampler.greedy()) {
      for (Leaf& leaf : leaves) {
        tree.drawn_from[static_cast<size_t>(leaf.node)] = std::move(leaf.q);
      }
    }
    // The probabilities after the last level are not needed.
    if (level == shape.depth || next.empty() || interrupted()) {
      return tree;
    }
    ASSIGN_OR_RETURN(
        const bool fits, cache().can_extend(static_cast<int32_t>(next.size())));
    if (!fits) {
      return tree;
    }
    ASSIGN_OR_RETURN(logits, run_level(tree, next.size()));
    RETURN_IF_ERROR(check_rows(logits, next.size()));
    watch.lap();
    for (size_t i = 0; i < next.size(); ++i) {
      ASSIGN_OR_RETURN(
          next[i].q, softmax(logits, static_cast<int64_t>(i), temperature));
    }
    leaves = std::move(next);
  }
}

Result<TokenTree> ProgramDraft::grow_chain(
    TokenTree tree,
    LogitsView logits,
    const TreeShape& shape) {
  for (int64_t level = 1; tree.size() < shape.most; ++level) {
    Stopwatch watch;
    ASSIGN_OR_RETURN(const int64_t id, argmax(logits, logits.last_row()));
    choosing_one_.add(1, watch.lap());
    tree.add(id, static_cast<int32_t>(tree.size()) - 1);
    if (level == shape.depth || interrupted()) {
      break;
    }
    ASSIGN_OR_RETURN(const bool fits, cache().can_extend(1));
    if (!fits) {
      break;
    }
    ASSIGN_OR_RETURN(logits, run_level(tree, 1));
    RETURN_IF_ERROR(check_rows(logits, 1));
  }
  return tree;
}

/// Runs the part of a text that is not in the cache, at least its last id.
/// Returns nullopt after Ctrl-C.
Result<std::optional<LogitsView>> ProgramDraft::read(
    const std::vector<int64_t>& text) {
  ASSIGN_OR_RETURN(const size_t lasting, reusable(text));
  const size_t shared =
      std::min({shared_prefix(text, held_), lasting, text.size() - 1});
  if (shared < held_.size()) {
    ASSIGN_OR_RETURN(const int32_t least, cache().rewindable_to());
    // Layers with windows may have dropped rows that the text needs.
    const size_t kept = shared < static_cast<size_t>(least) ? 0 : shared;
    RETURN_IF_ERROR(cache().rewind(static_cast<int32_t>(kept)));
    held_.resize(kept);
  }
  // Longer steps are a poor measure of the cost of levels.
  constexpr size_t kFew = 64;
  while (!interrupted()) {
    const size_t n =
        std::min(program_.prefill_size(), text.size() - held_.size());
    Stopwatch watch;
    ASSIGN_OR_RETURN(const auto logits, run_text(text, held_.size(), n));
    if (n <= kFew) {
      latency_.add(n, watch.lap());
    }
    held_.insert(
        held_.end(),
        text.begin() + static_cast<std::ptrdiff_t>(held_.size()),
        text.begin() + static_cast<std::ptrdiff_t>(held_.size() + n));
    if (held_.size() == text.size()) {
      return std::optional(logits);
    }
  }
  return std::optional<LogitsView>();
}

/// Runs the last `n` nodes of a tree as one frontier. In the cache the root is
/// part of the text, so a node's number there is one less than in the tree.
Result<LogitsView> ProgramDraft::run_level(const TokenTree& tree, size_t n) {
  const auto first = static_cast<std::ptrdiff_t>(tree.size() - n);
  std::vector<int32_t> parents;
  for (auto at = tree.parents.begin() + first; at != tree.parents.end(); ++at) {
    parents.push_back(*at - 1);
  }
  const auto positions = tree.positions(static_cast<int64_t>(held_.size()) - 1);
  Stopwatch watch;
  RETURN_IF_ERROR(cache().propose(parents));
  auto logits = run_nodes(tree, positions, tree.size() - n);
  if (logits.ok()) {
    latency_.add(n, watch.lap());
    run_.insert(run_.end(), tree.tokens.begin() + first, tree.tokens.end());
    return logits;
  }
  RETURN_IF_ERROR(cache().commit({}));
  run_.clear();
  return logits;
}

Result<void> ProgramDraft::commit(const std::vector<int32_t>& accepted) {
  auto kept = keep(accepted);
  return kept.ok() ? kept : of_draft(kept.error());
}

Result<void> ProgramDraft::keep(const std::vector<int32_t>& accepted) {
  if (run_.empty()) {
    return {};
  }
  std::vector<int32_t> nodes;
  std::vector<int64_t> ids;
  for (const int32_t node : accepted) {
    if (node > 0 && static_cast<size_t>(node) <= run_.size()) {
      nodes.push_back(node - 1);
      ids.push_back(run_[static_cast<size_t>(node) - 1]);
    }
  }
  RETURN_IF_ERROR(cache().commit(nodes));
  held_.insert(held_.end(), ids.begin(), ids.end());
  run_.clear();
  return {};
}

double ProgramDraft::seconds(int64_t depth, int64_t width) const {
  if (depth == 0) {
    return 0.0;
  }
  // Without greedy decoding, a chain needs probabilities too.
  const bool likeliest_only = width == 1 && greedy_;
  const auto level = [&](double nodes) {
    return latency_.at(nodes) +
           (likeliest_only ? choosing_one_ : choosing_).at(nodes);
  };
  return level(1.0) +
         static_cast<double>(depth - 1) * level(static_cast<double>(width));
}

} // namespace etkv::examples
