// Implements tokenizer.hpp with the functions that cxx generates from
// src/bridge.rs. No exception leaves this file.
#include "examples/tokenizer/tokenizer.hpp"

#include <exception>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "etkv-tokenizer/src/bridge.rs.h"

namespace etkv::examples {
namespace {

rust::Slice<const uint8_t> bytes(std::string_view text) {
  // An empty slice still needs an address.
  return text.empty()
             ? rust::Slice<const uint8_t>()
             : rust::Slice<const uint8_t>(
                   reinterpret_cast<const uint8_t*>(text.data()), text.size());
}

/// Copies ids to the type that programs accept.
template <typename Ids>
std::vector<int64_t> copied(const Ids& ids) {
  return {ids.begin(), ids.end()};
}

std::string_view viewed(rust::Str text) {
  return {text.data(), text.size()};
}

std::vector<bridge::Message> bridged(const std::vector<Message>& messages) {
  std::vector<bridge::Message> bridged;
  bridged.reserve(messages.size());
  for (const auto& message : messages) {
    rust::Vec<uint32_t> ids;
    ids.reserve(message.ids.size());
    for (const int64_t id : message.ids) {
      if (id < 0 || id > std::numeric_limits<uint32_t>::max()) {
        throw std::invalid_argument(
            "expected token ids from 0 to 4294967295 in a message, got " +
            std::to_string(id));
      }
      ids.push_back(static_cast<uint32_t>(id));
    }
    bridged.push_back(
        {bytes(message.role), bytes(message.content), std::move(ids)});
  }
  return bridged;
}

/// Returns the result of `call`, or the exception that it throws as an error.
template <typename Call>
auto caught(Call&& call) -> Result<decltype(call())> {
  try {
    return call();
  } catch (const std::exception& error) {
    return Error(ETKV_ERROR_INVALID_ARGUMENT, error.what());
  }
}

} // namespace

void Detokenizer::Free::operator()(bridge::Detokenizer* raw) const {
  rust::Box<bridge::Detokenizer>::from_raw(raw);
}

Result<std::string_view> Detokenizer::add_token(int64_t id) {
  return caught([&] { return viewed(bridge::add_token(*raw_, id)); });
}

Result<std::string_view> Detokenizer::finalize() {
  return caught([&] { return viewed(bridge::finalize(*raw_)); });
}

void Tokenizer::Free::operator()(bridge::Tokenizer* raw) const {
  rust::Box<bridge::Tokenizer>::from_raw(raw);
}

Result<Tokenizer> Tokenizer::from_pretrained(const std::string& path) {
  return caught([&] {
    return Tokenizer(bridge::from_pretrained(bytes(path)).into_raw());
  });
}

Result<std::vector<int64_t>> Tokenizer::encode(
    std::string_view text,
    bool add_special_tokens) const {
  return caught([&] {
    return copied(bridge::encode(*raw_, bytes(text), add_special_tokens));
  });
}

Result<bool> Tokenizer::begins_with_bos(std::string_view text) const {
  return caught([&] { return bridge::begins_with_bos(*raw_, bytes(text)); });
}

bool Tokenizer::has_chat_template() const {
  return raw_->has_chat_template();
}

Result<std::string> Tokenizer::render_chat_template(
    const std::vector<Message>& messages,
    bool add_generation_prompt,
    std::string_view variables) const {
  return caught([&] {
    const auto all = bridged(messages);
    return std::string(
        bridge::render_chat_template(
            *raw_,
            {all.data(), all.size()},
            add_generation_prompt,
            bytes(variables)));
  });
}

Result<std::vector<int64_t>> Tokenizer::apply_chat_template(
    const std::vector<Message>& messages,
    bool add_generation_prompt,
    std::string_view variables) const {
  return caught([&] {
    const auto all = bridged(messages);
    return copied(
        bridge::apply_chat_template(
            *raw_,
            {all.data(), all.size()},
            add_generation_prompt,
            bytes(variables)));
  });
}

std::vector<int64_t> Tokenizer::eos_token_ids() const {
  return copied(raw_->eos_token_ids());
}

Detokenizer Tokenizer::detokenizer(bool skip_special_tokens) const {
  return Detokenizer(raw_->detokenizer(skip_special_tokens).into_raw());
}

Result<void> check_template_variables(std::string_view variables) {
  auto checked = caught([&] {
    bridge::check_variables(bytes(variables));
    return true;
  });
  return checked.ok() ? Result<void>() : Result<void>(checked.error());
}

} // namespace etkv::examples
