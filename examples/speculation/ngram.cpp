#include "examples/speculation/ngram.hpp"

#include <algorithm>
#include <cstddef>
#include <map>

namespace etkv::examples {
namespace {

/// The minimum and maximum ids that must match: a single id says little, and a
/// longer match adds nothing.
constexpr size_t kMin = 2;
constexpr size_t kMax = 8;

/// An earlier place of the text, and the match before it.
struct Place {
  size_t next; ///< where it goes on
  double weight;
};

/// Returns how many ids before `at` match those before the end.
size_t likeness(const std::vector<int64_t>& text, size_t at) {
  size_t n = 0;
  while (n < kMax && n < at && text[at - 1 - n] == text[text.size() - 1 - n]) {
    ++n;
  }
  return n;
}

std::vector<Place> places(const std::vector<int64_t>& text) {
  std::vector<Place> found;
  for (size_t at = kMin; at < text.size(); ++at) {
    if (const size_t n = likeness(text, at); n >= kMin) {
      // One more id outweighs several places; of ties the later place wins.
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

/// A node of the tree, the places that match it, and the ids on its path.
struct Branch {
  int32_t node;
  std::vector<Place> places;
  std::vector<int64_t> path;
};

/// Returns the id at `at` of the text and its proposed continuation, so that a
/// repetition can go on past the end.
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
  std::vector<Place> places;
  double weight;
};

std::vector<Candidate> candidates(
    const std::vector<int64_t>& text,
    const std::vector<Branch>& level) {
  std::vector<Candidate> found;
  for (const Branch& branch : level) {
    std::map<int64_t, Candidate> by_token;
    for (const Place& place : branch.places) {
      const int64_t token = id_at(text, branch.path, place.next);
      auto& candidate =
          by_token.try_emplace(token, Candidate{&branch, token, {}, 0.0})
              .first->second;
      candidate.places.push_back({place.next + 1, place.weight});
      candidate.weight += place.weight;
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
  std::vector<Branch> level = {{0, places(text), {}}};
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
           std::move(candidate.places),
           std::move(path)});
    }
    level = std::move(next);
  }
  return tree;
}

} // namespace etkv::examples
