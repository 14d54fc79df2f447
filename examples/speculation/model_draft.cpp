#include "examples/speculation/model_draft.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "examples/common/clock.hpp"
#include "examples/common/prefix.hpp"
#include "examples/common/try.hpp"

namespace etkv::examples {
namespace {

/// A node that can have children: what they are drawn from, and how likely the
/// way to it is.
struct Leaf {
  int32_t node;
  Distribution q;
  double log_probability;
};

/// A possible child.
struct Candidate {
  size_t leaf;
  int64_t token;
  double log_probability;
};

/// The `n` likeliest ids, likeliest first.
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
    // `n` is small: the few are kept in order.
    ids.insert(std::upper_bound(ids.begin(), ids.end(), id, likelier), id);
    ids.resize(std::min(ids.size(), n));
  }
  return ids;
}

/// The `n` likeliest children of all leaves together, likeliest first. The first
/// of them all is the likeliest child of the first leaf: so the chain of likeliest
/// ids is in the tree, however likely others are together.
std::vector<Candidate> likeliest(const std::vector<Leaf>& leaves, size_t n) {
  std::vector<Candidate> all;
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

/// Puts drawn ids in the place of the likeliest: as many for each leaf, so that
/// their number hangs on nothing that was drawn for it.
std::vector<Candidate> drawn(
    const std::vector<Leaf>& leaves,
    const std::vector<Candidate>& chosen,
    Chance& chance) {
  std::vector<Candidate> all;
  for (size_t leaf = 0; leaf < leaves.size(); ++leaf) {
    Distribution left = leaves[leaf].q;
    for (const auto& candidate : chosen) {
      if (candidate.leaf != leaf) {
        continue;
      }
      const int64_t token = draw(left, chance);
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

Result<std::unique_ptr<Draft>> ModelDraft::open(
    const std::string& path,
    const Target& target) {
  ASSIGN_OR_RETURN(auto program, Program::open(path));
  if (program.vocabulary() != target.vocabulary) {
    return Error(
        ETKV_ERROR_PROGRAM,
        "the draft " + path + " has a vocabulary of " +
            std::to_string(program.vocabulary()) +
            " ids, and the model one of " + std::to_string(target.vocabulary));
  }
  const int32_t capacity =
      std::min(target.capacity, program.params().max_context_length);
  ASSIGN_OR_RETURN(
      auto session,
      make_tree_session(
          kMLXBackend,
          make_config(
              program.params(),
              capacity,
              target.kv_format.value_or(program.native_format()))));
  RETURN_IF_ERROR(program.load(session.key(), Logits::all));
  return std::unique_ptr<Draft>(
      new ModelDraft(std::move(program), std::move(session)));
}

Result<TokenTree> ModelDraft::propose(
    const std::vector<int64_t>& text,
    const TreeShape& shape,
    Sampler& sampler) {
  // What came of the tree before was never said: nothing.
  RETURN_IF_ERROR(commit({}));
  tree_ = TokenTree(text.back());
  const auto room = static_cast<int64_t>(cache().capacity());
  if (shape.depth == 0 || static_cast<int64_t>(text.size()) > room) {
    return tree_;
  }
  // Greedy decoding knows no temperature; likeliest is likeliest.
  const double temperature = sampler.greedy() ? 1.0 : sampler.temperature;
  ASSIGN_OR_RETURN(auto logits, read(text));
  std::vector<Leaf> leaves = {
      {0, softmax(logits, logits.last_row(), temperature), 0.0}};
  for (int64_t level = 1;; ++level) {
    const size_t left = std::min<size_t>(
        shape.most - tree_.size(), static_cast<size_t>(shape.width));
    auto children = likeliest(leaves, left);
    if (!sampler.greedy()) {
      children = drawn(leaves, children, sampler.chance);
      for (const Leaf& leaf : leaves) {
        tree_.drawn_from[static_cast<size_t>(leaf.node)] = leaf.q;
      }
    }
    std::vector<Leaf> next;
    for (const auto& child : children) {
      next.push_back(
          {tree_.add(child.token, leaves[child.leaf].node),
           {},
           child.log_probability});
    }
    // What the last level makes likely is asked by nobody.
    if (level == shape.depth || next.empty() ||
        !cache().can_extend(static_cast<int32_t>(next.size()))) {
      return tree_;
    }
    ASSIGN_OR_RETURN(logits, run_level(next.size()));
    for (size_t i = 0; i < next.size(); ++i) {
      next[i].q = softmax(logits, static_cast<int64_t>(i), temperature);
    }
    leaves = std::move(next);
  }
}

/// Reads what of a text is not held yet, its last id at least.
Result<LogitsView> ModelDraft::read(const std::vector<int64_t>& text) {
  const size_t shared = std::min(shared_prefix(text, held_), text.size() - 1);
  if (shared < held_.size()) {
    RETURN_IF_ERROR(cache().rewind(static_cast<int32_t>(shared)));
    held_.resize(shared);
  }
  for (;;) {
    const size_t n =
        std::min(program_.prefill_size(), text.size() - held_.size());
    Stopwatch watch;
    ASSIGN_OR_RETURN(
        const auto logits,
        program_.step_at(
            text.data() + held_.size(), static_cast<int64_t>(held_.size()), n));
    costs_.add(n, watch.lap());
    held_.insert(
        held_.end(),
        text.begin() + static_cast<std::ptrdiff_t>(held_.size()),
        text.begin() + static_cast<std::ptrdiff_t>(held_.size() + n));
    if (held_.size() == text.size()) {
      return logits;
    }
  }
}

/// Runs the last `n` nodes of the tree as one frontier. The root is a part of the
/// text here, so that nodes have one number less in the cache.
Result<LogitsView> ModelDraft::run_level(size_t n) {
  const size_t first = tree_.size() - n;
  std::vector<int32_t> parents;
  for (size_t node = first; node < tree_.size(); ++node) {
    parents.push_back(tree_.parents[node] - 1);
  }
  const auto positions =
      tree_.positions(static_cast<int64_t>(held_.size()) - 1);
  Stopwatch watch;
  RETURN_IF_ERROR(cache().propose(parents));
  auto logits =
      program_.step(tree_.tokens.data() + first, positions.data() + first, n);
  if (logits.ok()) {
    costs_.add(n, watch.lap());
    run_ += n;
    return logits;
  }
  run_ = 0;
  RETURN_IF_ERROR(cache().commit({}));
  return logits;
}

Result<void> ModelDraft::commit(const std::vector<int32_t>& accepted) {
  if (run_ == 0) {
    return {};
  }
  std::vector<int32_t> nodes;
  for (const int32_t node : accepted) {
    if (node > 0 && static_cast<size_t>(node) <= run_) {
      nodes.push_back(node - 1);
      held_.push_back(tree_.tokens[static_cast<size_t>(node)]);
    }
  }
  run_ = 0;
  return cache().commit(nodes);
}

double ModelDraft::seconds(int64_t depth, int64_t width) const {
  return depth == 0
             ? 0.0
             : costs_.at(1.0) + static_cast<double>(depth - 1) *
                                    costs_.at(static_cast<double>(width));
}

} // namespace etkv::examples
