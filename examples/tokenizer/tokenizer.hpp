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

/// What one side of a conversation said.
struct Message {
  /// "system", "user", "assistant", or what else the template knows.
  std::string role;
  std::string content;
};

/// The text of one answer, made from its ids one at a time; without special
/// tokens.
class Detokenizer {
 public:
  /// The text that `id` completes: whole characters, maybe none; valid until
  /// the next call.
  Result<std::string_view> add_token(int64_t id);

  /// Ends the answer: the text that was held back, in which U+FFFD stands for a
  /// character that was cut short. Valid until the next call, which may begin
  /// another answer.
  Result<std::string_view> finalize();

 private:
  friend class Tokenizer;
  struct Free {
    void operator()(bridge::Detokenizer* raw) const;
  };
  explicit Detokenizer(bridge::Detokenizer* raw) : raw_(raw) {}

  std::unique_ptr<bridge::Detokenizer, Free> raw_;
};

/// A tokenizer, and what its folder says about conversations. Text is UTF-8.
/// Several threads may use one.
class Tokenizer {
 public:
  /// Reads a tokenizer.json, or the folder that holds one. Beside it are read,
  /// if they are there: chat_template.jinja, tokenizer_config.json and
  /// generation_config.json.
  static Result<Tokenizer> from_pretrained(const std::string& path);

  /// The ids of `text`; with the tokens that the tokenizer puts around a text
  /// if `add_special_tokens`.
  Result<std::vector<int64_t>> encode(
      std::string_view text,
      bool add_special_tokens) const;

  /// Whether the model has a chat template.
  bool has_chat_template() const;

  /// The ids of a conversation, as the model's chat template writes it; up to
  /// where the model's next message begins if `add_generation_prompt`.
  Result<std::vector<int64_t>> apply_chat_template(
      const std::vector<Message>& messages,
      bool add_generation_prompt) const;

  /// The ids that end an answer: `eos_token_id` of generation_config.json, else
  /// the `eos_token` of tokenizer_config.json, else none.
  std::vector<int64_t> eos_token_ids() const;

  /// Begins an answer; the detokenizer may outlive this.
  Detokenizer detokenizer() const;

 private:
  struct Free {
    void operator()(bridge::Tokenizer* raw) const;
  };
  explicit Tokenizer(bridge::Tokenizer* raw) : raw_(raw) {}

  std::unique_ptr<bridge::Tokenizer, Free> raw_;
};

} // namespace etkv::examples
