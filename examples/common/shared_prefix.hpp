// The common beginning of two texts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace etkv::examples {

/// Returns the length of the common prefix of `a` and `b`.
size_t shared_prefix(
    const std::vector<int64_t>& a,
    const std::vector<int64_t>& b);

} // namespace etkv::examples
