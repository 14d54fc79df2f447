// Stored texts. The contents of the cache are kept in memory and in a folder,
// so the beginning of a text is read only once, even by several processes.
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
  /// Opens the folder in the options; nullopt if they name none.
  static Result<std::optional<StoredTexts>> open(
      const Model& model,
      const Options& options);

  /// Attaches the cache to the longest stored beginning of a prompt, unless the
  /// cache already holds as much. `generator` runs on the cache.
  Result<void>
  load(Cache& cache, Generator& generator, const std::vector<int64_t>& prompt);

  /// Stores the contents of the cache.
  Result<void> save(Cache& cache, const Generator& generator);

  /// Returns whether to store a prompt before it is answered. A stored text of
  /// a model with windows can be continued only from near its end, and the next
  /// prompt may tokenize the answer differently.
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
