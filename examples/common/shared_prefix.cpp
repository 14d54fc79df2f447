#include "examples/common/shared_prefix.hpp"

#include <algorithm>

namespace etkv::examples {

size_t shared_prefix(
    const std::vector<int64_t>& a,
    const std::vector<int64_t>& b) {
  const auto differs = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  return static_cast<size_t>(differs.first - a.begin());
}

} // namespace etkv::examples
