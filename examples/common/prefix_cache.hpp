// The ids that the sequences of one cache hold, for later prompts to go on from.
// Several caches share an etkv::PrefixCache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace etkv::examples {

/// Returns how many ids `a` and `b` share from the first on.
size_t shared_prefix(
    const std::vector<int64_t>& a,
    const std::vector<int64_t>& b);

/// The ids that each sequence holds, and the order of their last use. It holds
/// numbers only: the caller changes the cache.
class SequenceTexts {
 public:
  /// A sequence, and the number of its first ids that a prompt shares.
  struct Match {
    int32_t sequence = 0;
    size_t shared = 0;
  };

  /// Returns the sequence that shares most with `ids`, and of equals the one
  /// used last. Returns nothing if no sequence shares any.
  std::optional<Match> longest(const std::vector<int64_t>& ids) const;

  /// Returns the ids that a sequence holds; none if it is empty.
  const std::vector<int64_t>& of(int32_t sequence) const;

  /// Notes that a sequence holds these ids, and is used now.
  void hold(int32_t sequence, std::vector<int64_t> ids);

  /// Notes that a sequence is empty.
  void forget(int32_t sequence);

  /// Returns the sequence that was used longest ago, other than `except`.
  std::optional<int32_t> oldest(int32_t except) const;

  /// Returns the least number that no sequence has.
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
