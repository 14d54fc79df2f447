#include "examples/common/stored_prefixes.hpp"

#include <algorithm>
#include <utility>

#include "examples/common/try.hpp"

namespace etkv::examples {

Result<StoredPrefixes> open_prefixes(
    const Model& model,
    const std::optional<std::string>& place,
    uint64_t bytes,
    uint64_t memory) {
  std::optional<PrefixStore> store;
  // Without a store there are only texts of this model, so any fingerprint will
  // do.
  std::string fingerprint = "this model";
  if (place) {
    ASSIGN_OR_RETURN(store, PrefixStore::open(*place, bytes));
    ASSIGN_OR_RETURN(fingerprint, etkv::fingerprint(model.path()));
  }
  const auto config = model.config();
  if (memory == 0) {
    ASSIGN_OR_RETURN(const Memory whole, estimate(config, config.capacity));
    memory = whole.at_capacity;
  }
  ASSIGN_OR_RETURN(
      auto prefixes, PrefixCache::make(memory, store ? &*store : nullptr));
  const bool has_windows = std::any_of(
      config.layers.begin(), config.layers.end(), [](const LayerConfig& layer) {
        return layer.window > 0 || layer.chunk > 0;
      });
  return StoredPrefixes{
      std::move(prefixes), std::move(fingerprint), has_windows};
}

} // namespace etkv::examples
