#include "examples/chat/stored_texts.hpp"

#include <utility>

#include "examples/common/prefix_cache.hpp"
#include "examples/common/try.hpp"

namespace etkv::examples {

StoredTexts::StoredTexts(PrefixStore store, std::string fingerprint)
    : store_(std::move(store)), fingerprint_(std::move(fingerprint)) {}

Result<std::optional<StoredTexts>> StoredTexts::open(
    const Model& model,
    const Options& options) {
  if (!options.prefix_store) {
    return std::optional<StoredTexts>();
  }
  ASSIGN_OR_RETURN(
      auto store,
      PrefixStore::open(*options.prefix_store, options.prefix_store_bytes));
  ASSIGN_OR_RETURN(auto fingerprint, etkv::fingerprint(model.path()));
  return std::optional<StoredTexts>(
      StoredTexts(std::move(store), std::move(fingerprint)));
}

Result<void> StoredTexts::load(
    Cache& cache,
    Generator& generator,
    const std::vector<int64_t>& prompt) const {
  if (prompt.empty()) {
    return {};
  }
  // The last token runs in any case: its logits choose the first of the answer.
  const SaveOptions text = {fingerprint_, {prompt.begin(), prompt.end() - 1}};
  ASSIGN_OR_RETURN(const size_t stored, store_.find(cache, text));
  const size_t shared = shared_prefix(text.tokens, generator.held());
  // Layers with windows may have dropped what the next token would see.
  ASSIGN_OR_RETURN(const int32_t least, cache.rewindable_to());
  if (stored <= (shared < static_cast<size_t>(least) ? 0 : shared)) {
    return {};
  }
  RETURN_IF_ERROR(cache.clear());
  generator.hold({});
  ASSIGN_OR_RETURN(const size_t loaded, store_.load(cache, text));
  const auto end = text.tokens.begin() + static_cast<std::ptrdiff_t>(loaded);
  generator.hold({text.tokens.begin(), end});
  return {};
}

Result<void> StoredTexts::save(const Cache& cache, const Generator& generator) {
  ASSIGN_OR_RETURN(
      const bool written, store_.save(cache, {fingerprint_, generator.held()}));
  static_cast<void>(written);
  return {};
}

} // namespace etkv::examples
