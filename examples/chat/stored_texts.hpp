// Texts that outlive the process: what the cache has read is kept in a folder, so
// that a later conversation that begins alike does not read it again.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "etkv/etkv.hpp"
#include "examples/chat/options.hpp"
#include "examples/common/generator.hpp"
#include "examples/common/model.hpp"

namespace etkv::examples {

class StoredTexts {
 public:
  /// Opens the folder that the options name; nothing if they name none.
  static Result<std::optional<StoredTexts>> open(
      const Model& model,
      const Options& options);

  /// Loads the longest beginning of a prompt that the folder has, if the cache
  /// does not hold as much of it. `generator` runs on the cache.
  Result<void> load(
      Cache& cache,
      Generator& generator,
      const std::vector<int64_t>& prompt) const;

  /// Stores what the cache holds.
  Result<void> save(const Cache& cache, const Generator& generator);

 private:
  StoredTexts(PrefixStore store, std::string fingerprint);

  PrefixStore store_;
  std::string fingerprint_;
};

} // namespace etkv::examples
