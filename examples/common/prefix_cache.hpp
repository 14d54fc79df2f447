// The prefix cache: what the sequences of a cache hold, and which of them a prompt
// can go on from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace etkv::examples {

/// How many ids `a` and `b` have in common from the first on.
size_t shared_prefix(
    const std::vector<int64_t>& a,
    const std::vector<int64_t>& b);

/// The ids that each sequence holds, and which of them was used when. Knows
/// numbers only: the cache is the caller's to change.
class PrefixCache {
 public:
  /// A sequence, and how many of its first ids a prompt shares.
  struct Match {
    int32_t sequence = 0;
    size_t shared = 0;
  };

  /// The sequence that shares most with `ids`, the one used last of equals;
  /// nothing where none shares any.
  std::optional<Match> longest(const std::vector<int64_t>& ids) const;

  /// The ids that a sequence holds; none if it holds nothing.
  const std::vector<int64_t>& of(int32_t sequence) const;

  /// A sequence holds these ids, and was used just now.
  void hold(int32_t sequence, std::vector<int64_t> ids);

  /// A sequence holds nothing.
  void forget(int32_t sequence);

  /// The sequence that was used longest ago, but for one.
  std::optional<int32_t> oldest(int32_t except) const;

  /// The least number that no sequence has.
  int32_t unused() const;

  size_t size() const {
    return held_.size();
  }

 private:
  struct Held {
    std::vector<int64_t> ids;
    uint64_t used = 0;
  };
  std::map<int32_t, Held> held_;
  uint64_t now_ = 0;
};

} // namespace etkv::examples
