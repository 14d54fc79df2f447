#include "examples/common/prefix_cache.hpp"

#include <algorithm>
#include <utility>

namespace etkv::examples {

size_t shared_prefix(
    const std::vector<int64_t>& a,
    const std::vector<int64_t>& b) {
  const auto differs = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  return static_cast<size_t>(differs.first - a.begin());
}

std::optional<SequenceTexts::Match> SequenceTexts::longest(
    const std::vector<int64_t>& ids) const {
  std::optional<Match> best;
  uint64_t used = 0;
  for (const auto& [sequence, held] : held_) {
    const size_t shared = shared_prefix(ids, held.ids);
    const size_t most = best ? best->shared : 0;
    if (shared > most || (best && shared == most && held.used > used)) {
      best = Match{sequence, shared};
      used = held.used;
    }
  }
  return best;
}

const std::vector<int64_t>& SequenceTexts::of(int32_t sequence) const {
  static const std::vector<int64_t> none;
  const auto found = held_.find(sequence);
  return found == held_.end() ? none : found->second.ids;
}

void SequenceTexts::hold(int32_t sequence, std::vector<int64_t> ids) {
  held_[sequence] = Held{std::move(ids), ++now_};
}

void SequenceTexts::forget(int32_t sequence) {
  held_.erase(sequence);
}

std::optional<int32_t> SequenceTexts::oldest(int32_t except) const {
  std::optional<int32_t> found;
  uint64_t used = UINT64_MAX;
  for (const auto& [sequence, held] : held_) {
    if (sequence != except && held.used < used) {
      found = sequence;
      used = held.used;
    }
  }
  return found;
}

int32_t SequenceTexts::unused() const {
  int32_t number = 0;
  // Entries are in order of their numbers, so the first gap is the least.
  for (const auto& entry : held_) {
    if (entry.first != number) {
      break;
    }
    ++number;
  }
  return number;
}

} // namespace etkv::examples
