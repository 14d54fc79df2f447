#include "examples/chat/stored_texts.hpp"

#include <utility>

#include "examples/common/shared_prefix.hpp"
#include "examples/common/try.hpp"

namespace etkv::examples {

StoredTexts::StoredTexts(StoredPrefixes stored)
    : prefixes_(std::move(stored.prefixes)),
      fingerprint_(std::move(stored.fingerprint)),
      has_windows_(stored.has_windows) {}

Result<std::optional<StoredTexts>> StoredTexts::open(
    const Model& model,
    const Options& options) {
  if (!options.prefix_store) {
    return std::optional<StoredTexts>();
  }
  ASSIGN_OR_RETURN(
      auto stored,
      open_prefixes(model, options.prefix_store, options.prefix_store_bytes));
  return std::optional<StoredTexts>(StoredTexts(std::move(stored)));
}

Result<void> StoredTexts::load(
    Cache& cache,
    Generator& generator,
    const std::vector<int64_t>& prompt) {
  if (prompt.empty()) {
    return {};
  }
  // The last token always runs, because its logits choose the answer's first
  // token.
  const SaveOptions text = {fingerprint_, {prompt.begin(), prompt.end() - 1}};
  ASSIGN_OR_RETURN(const size_t kept, prefixes_.find(cache, text));
  const size_t shared = shared_prefix(text.tokens, generator.held());
  // Layers with windows and recurrent layers may have dropped state that the
  // next token reads.
  ASSIGN_OR_RETURN(
      const int32_t reachable, cache.reachable(static_cast<int32_t>(shared)));
  if (kept <= static_cast<size_t>(reachable)) {
    return {};
  }
  RETURN_IF_ERROR(cache.clear());
  generator.hold({});
  ASSIGN_OR_RETURN(const size_t attached, prefixes_.attach(cache, text));
  const auto end = text.tokens.begin() + static_cast<std::ptrdiff_t>(attached);
  generator.hold({text.tokens.begin(), end});
  return {};
}

Result<void> StoredTexts::save(Cache& cache, const Generator& generator) {
  if (generator.held().empty()) {
    return {};
  }
  ASSIGN_OR_RETURN(
      const bool kept, prefixes_.keep(cache, {fingerprint_, generator.held()}));
  static_cast<void>(kept);
  return {};
}

} // namespace etkv::examples
