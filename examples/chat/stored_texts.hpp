// Texts that outlive the process: what the cache has read is kept in memory and in
// a folder, so that what begins alike is not read again.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "etkv/etkv.hpp"
#include "examples/chat/options.hpp"
#include "examples/common/generator.hpp"
#include "examples/common/model.hpp"
#include "examples/common/stored_prefixes.hpp"

namespace etkv::examples {

class StoredTexts {
 public:
  /// Opens the folder that the options name; nothing if they name none.
  static Result<std::optional<StoredTexts>> open(
      const Model& model,
      const Options& options);

  /// Makes the cache go on from the longest beginning of a prompt that is kept,
  /// if it does not hold as much of it. `generator` runs on the cache.
  Result<void>
  load(Cache& cache, Generator& generator, const std::vector<int64_t>& prompt);

  /// Keeps what the cache holds.
  Result<void> save(Cache& cache, const Generator& generator);

  /// Whether a prompt is worth keeping before it is answered: a text of a model
  /// with windows can be gone on from near its end alone, and an answer may be
  /// other tokens in the next prompt.
  bool keeps_prompts() const {
    return has_windows_;
  }

 private:
  explicit StoredTexts(StoredPrefixes stored);

  PrefixCache prefixes_;
  std::string fingerprint_;
  bool has_windows_;
};

} // namespace etkv::examples
