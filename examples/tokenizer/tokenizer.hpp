// The tokenizer and the chat template that a model is published with. A part of
// the examples, not of etkv.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "etkv/etkv.hpp"

namespace etkv::examples {

namespace bridge {
struct Tokenizer;
struct Detokenizer;
} // namespace bridge

/// A message of a conversation.
struct Message {
  /// "system", "user", "assistant", or another role of the template.
  std::string role;
  std::string content;
};

/// Makes the text of one answer from its ids, one at a time, without special
/// tokens.
class Detokenizer {
 public:
  /// Returns the text that `id` completes: whole characters, or none. Valid
  /// until the next call.
  Result<std::string_view> add_token(int64_t id);

  /// Ends the answer and returns the rest of its text. U+FFFD stands for an
  /// incomplete character. Valid until the next call, which may begin another
  /// answer.
  Result<std::string_view> finalize();

 private:
  friend class Tokenizer;
  struct Free {
    void operator()(bridge::Detokenizer* raw) const;
  };
  explicit Detokenizer(bridge::Detokenizer* raw) : raw_(raw) {}

  std::unique_ptr<bridge::Detokenizer, Free> raw_;
};

/// A tokenizer, and the settings of its folder for conversations. Text is
/// UTF-8. Several threads may use one tokenizer.
class Tokenizer {
 public:
  /// Reads a tokenizer.json, or the folder that holds one. Also reads, from the
  /// same folder if they exist, chat_template.jinja, tokenizer_config.json and
  /// generation_config.json.
  static Result<Tokenizer> from_pretrained(const std::string& path);

  /// Returns the ids of `text`. With `add_special_tokens`, includes the tokens
  /// that the tokenizer puts around a text.
  Result<std::vector<int64_t>> encode(
      std::string_view text,
      bool add_special_tokens) const;

  /// Returns whether the model has a chat template.
  bool has_chat_template() const;

  /// Returns the ids of a conversation in the model's chat template. With
  /// `add_generation_prompt`, it ends where the model's next message begins.
  Result<std::vector<int64_t>> apply_chat_template(
      const std::vector<Message>& messages,
      bool add_generation_prompt) const;

  /// Returns the ids that end an answer: `eos_token_id` of
  /// generation_config.json, or else the `eos_token` of tokenizer_config.json,
  /// or else none.
  std::vector<int64_t> eos_token_ids() const;

  /// Returns a detokenizer for one answer. It may outlive the tokenizer.
  Detokenizer detokenizer() const;

 private:
  struct Free {
    void operator()(bridge::Tokenizer* raw) const;
  };
  explicit Tokenizer(bridge::Tokenizer* raw) : raw_(raw) {}

  std::unique_ptr<bridge::Tokenizer, Free> raw_;
};

} // namespace etkv::examples
