#include "examples/speculation/ngram.hpp"

#include <algorithm>
#include <cstddef>
#include <map>

namespace etkv::examples {
namespace {

/// The minimum and maximum length of a match that counts: one id is a poor
/// predictor, and longer matches are no better.
constexpr size_t kMin = 2;
constexpr size_t kMax = 8;

/// An earlier match in the text.
struct Match {
  size_t next; ///< the index after the match
  double weight;
};

/// Returns how many ids before `at` match the ids before the end of the text.
size_t match_length(const std::vector<int64_t>& text, size_t at) {
  size_t n = 0;
  while (n < kMax && n < at && text[at - 1 - n] == text[text.size() - 1 - n]) {
    ++n;
  }
  return n;
}

std::vector<Match> matches(const std::vector<int64_t>& text) {
  std::vector<Match> found;
  for (size_t at = kMin; at < text.size(); ++at) {
    if (const size_t n = match_length(text, at); n >= kMin) {
      // A longer match outweighs several shorter ones. Of equal matches, the
      // later one wins.
      double weight = 1.0 + static_cast<double>(at) /
                                (4.0 * static_cast<double>(text.size()));
      for (size_t i = kMin; i < n; ++i) {
        weight *= 4.0;
      }
      found.push_back({at, weight});
    }
  }
  return found;
}

/// A node of the tree, the matches of its path, and the ids of its path.
struct Branch {
  int32_t node;
  std::vector<Match> matches;
  std::vector<int64_t> path;
};

/// Returns the id at index `at` of the text followed by the proposed
/// continuation, so that a repetition can go on past the end of the text.
int64_t id_at(
    const std::vector<int64_t>& text,
    const std::vector<int64_t>& path,
    size_t at) {
  return at < text.size() ? text[at] : path[at - text.size()];
}

/// A possible child.
struct Candidate {
  const Branch* parent;
  int64_t token;
  std::vector<Match> matches;
  double weight;
};

std::vector<Candidate> candidates(
    const std::vector<int64_t>& text,
    const std::vector<Branch>& level) {
  std::vector<Candidate> found;
  for (const Branch& branch : level) {
    std::map<int64_t, Candidate> by_token;
    for (const Match& match : branch.matches) {
      const int64_t token = id_at(text, branch.path, match.next);
      auto& candidate =
          by_token.try_emplace(token, Candidate{&branch, token, {}, 0.0})
              .first->second;
      candidate.matches.push_back({match.next + 1, match.weight});
      candidate.weight += match.weight;
    }
    for (auto& [token, candidate] : by_token) {
      found.push_back(std::move(candidate));
    }
  }
  std::stable_sort(
      found.begin(), found.end(), [](const auto& a, const auto& b) {
        return a.weight > b.weight;
      });
  return found;
}

} // namespace

Result<TokenTree> NgramDraft::propose(
    const std::vector<int64_t>& text,
    const TreeShape& shape,
    Sampler&) {
  return grow(text, shape);
}

TokenTree NgramDraft::grow(
    const std::vector<int64_t>& text,
    const TreeShape& shape) {
  TokenTree tree(text.back());
  std::vector<Branch> level = {{0, matches(text), {}}};
  for (int64_t depth = 0; depth < shape.depth; ++depth) {
    std::vector<Branch> next;
    for (auto& candidate : candidates(text, level)) {
      if (next.size() == static_cast<size_t>(shape.width) ||
          tree.size() == shape.most) {
        break;
      }
      auto path = candidate.parent->path;
      path.push_back(candidate.token);
      next.push_back(
          {tree.add(candidate.token, candidate.parent->node),
           std::move(candidate.matches),
           std::move(path)});
    }
    level = std::move(next);
  }
  return tree;
}

} // namespace etkv::examples
