#include "examples/common/stored_prefixes.hpp"

#include <utility>

#include "examples/common/try.hpp"

namespace etkv::examples {

Result<StoredPrefixes>
open_prefixes(const Model& model, const std::string& place, uint64_t bytes) {
  ASSIGN_OR_RETURN(const auto store, PrefixStore::open(place, bytes));
  ASSIGN_OR_RETURN(auto fingerprint, etkv::fingerprint(model.path()));
  const auto config = model.config();
  ASSIGN_OR_RETURN(const Memory whole, estimate(config, config.capacity));
  ASSIGN_OR_RETURN(auto prefixes, PrefixCache::make(whole.at_capacity, &store));
  return StoredPrefixes{std::move(prefixes), std::move(fingerprint)};
}

} // namespace etkv::examples
