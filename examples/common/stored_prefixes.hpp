// Prefixes that outlive the process: a prefix cache with a store behind it.
#pragma once

#include <cstdint>
#include <string>

#include "etkv/etkv.hpp"
#include "examples/common/model.hpp"

namespace etkv::examples {

/// What was read before, of one model.
struct StoredPrefixes {
  PrefixCache prefixes;
  std::string fingerprint;
};

/// Opens a folder or bucket whose files take up to `bytes`. In memory prefixes
/// take as much as a cache of the model at its capacity.
Result<StoredPrefixes>
open_prefixes(const Model& model, const std::string& place, uint64_t bytes);

} // namespace etkv::examples
