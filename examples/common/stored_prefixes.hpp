// What was read before, of one model: a prefix cache, and a store behind it
// where prefixes are to outlive the process.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "etkv/etkv.hpp"
#include "examples/common/model.hpp"

namespace etkv::examples {

/// The files of a store take so many bytes at most, unless an option says
/// otherwise.
inline constexpr uint64_t kStoreBytes = uint64_t{4} << 30;

struct StoredPrefixes {
  PrefixCache prefixes;
  std::string fingerprint;
  /// Whether a text serves those alone that go on near its end.
  bool has_windows = false;
};

/// Makes a prefix cache, with a folder or bucket behind it whose files take up
/// to `bytes`, or without any. In memory prefixes take up to `memory`, or for 0 as
/// much as a contiguous cache of the model at its capacity.
Result<StoredPrefixes> open_prefixes(
    const Model& model,
    const std::optional<std::string>& place,
    uint64_t bytes = kStoreBytes,
    uint64_t memory = 0);

} // namespace etkv::examples
