#include "examples/chat/conversation.hpp"

#include <utility>

namespace etkv::examples {

Conversation::Conversation(
    const Model& model,
    bool raw,
    std::optional<std::string> system)
    : model_(model), raw_(raw), system_(std::move(system)) {}

Result<std::vector<int64_t>> Conversation::prompt(
    const std::string& said) const {
  if (raw_) {
    // The tokenizer's first token (BOS) is only for the start of a text.
    if (exchanges_.empty()) {
      return model_.encode_text(said);
    }
    const auto added =
        model_.tokenizer().encode(said, /*add_special_tokens=*/false);
    if (!added.ok()) {
      return added;
    }
    std::vector<int64_t> ids = exchanges_.back().ids;
    ids.insert(ids.end(), added->begin(), added->end());
    return ids;
  }
  std::vector<Message> messages;
  if (system_) {
    messages.push_back({"system", *system_});
  }
  for (const auto& exchange : exchanges_) {
    messages.push_back({"user", exchange.said});
    messages.push_back({"assistant", exchange.answer, exchange.answer_ids});
  }
  messages.push_back({"user", said});
  return model_.encode(messages);
}

void Conversation::add(
    const std::string& said,
    std::vector<int64_t> prompt,
    const std::vector<int64_t>& ids,
    const std::string& answer,
    size_t kept) {
  prompt.insert(prompt.end(), ids.begin(), ids.end());
  exchanges_.push_back(
      {said, answer, model_.without_eos(ids), std::move(prompt), kept});
}

std::optional<size_t> Conversation::undo() {
  if (exchanges_.empty()) {
    return std::nullopt;
  }
  const size_t kept = exchanges_.back().kept;
  exchanges_.pop_back();
  return kept;
}

void Conversation::reset() {
  exchanges_.clear();
}

} // namespace etkv::examples
