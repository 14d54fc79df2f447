// Prefixes of one model: a prefix cache, and a store if prefixes must outlive
// the process.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "etkv/etkv.hpp"
#include "examples/common/model.hpp"

namespace etkv::examples {

/// The maximum bytes of a store's files, unless an option says otherwise.
inline constexpr uint64_t kStoreBytes = uint64_t{4} << 30;

struct StoredPrefixes {
  PrefixCache prefixes;
  std::string fingerprint;
  /// Whether a stored text can be continued only from near its end.
  bool has_windows = false;
};

/// Makes a prefix cache, with or without a folder or bucket. The files of the
/// folder or bucket take at most `bytes`. Prefixes in memory take at most
/// `memory` bytes; 0 stands for the bytes of a contiguous cache of the model at
/// its capacity.
Result<StoredPrefixes> open_prefixes(
    const Model& model,
    const std::optional<std::string>& place,
    uint64_t bytes = kStoreBytes,
    uint64_t memory = 0);

} // namespace etkv::examples
