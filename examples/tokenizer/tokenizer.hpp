// The tokenizer and the chat template of a published model. A part of the
// examples, not of etkv.
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
  /// The ids that the model generated for `content`; empty for other text.
  std::vector<int64_t> ids = {};
};

/// Decodes the ids of one answer, one at a time. The returned pieces together
/// are the text of all ids: text that later ids may change is held back.
class Detokenizer {
 public:
  /// Returns the text that `id` completes: whole characters, or none. U+FFFD
  /// stands for bytes that form no character. An id without a token has no
  /// text; a number that cannot be an id is an error. The text is valid until
  /// the next call.
  Result<std::string_view> add_token(int64_t id);

  /// Ends the answer and returns the rest of its text. U+FFFD stands for an
  /// incomplete character. The text is valid until the next call, which may
  /// begin another answer.
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
  /// Reads a tokenizer.json, or the folder that holds one. If the folder has
  /// chat_template.jinja, additional_chat_templates/, tokenizer_config.json or
  /// generation_config.json, they are read too.
  static Result<Tokenizer> from_pretrained(const std::string& path);

  /// Returns all ids of `text`: truncation and padding of tokenizer.json are
  /// ignored. With `add_special_tokens`, includes the tokens that the tokenizer
  /// adds around a text. The first token (BOS) is not added to a text that
  /// already begins with it.
  Result<std::vector<int64_t>> encode(
      std::string_view text,
      bool add_special_tokens) const;

  /// Returns whether `text` begins with the token that the tokenizer adds
  /// before a text.
  Result<bool> begins_with_bos(std::string_view text) const;

  /// Returns whether the model has a chat template.
  bool has_chat_template() const;

  /// Returns the text of a conversation in the model's chat template. With
  /// `add_generation_prompt`, it ends where the model's next message begins.
  ///
  /// @param variables  additional variables of the template as a JSON object,
  ///                   such as {"tools": […], "enable_thinking": false}; may be
  ///                   empty. If it has `messages`, they replace the argument.
  Result<std::string> render_chat_template(
      const std::vector<Message>& messages,
      bool add_generation_prompt,
      std::string_view variables = {}) const;

  /// Returns the ids of a conversation. The ids of a message are used instead
  /// of its content, if the template writes that content unchanged.
  Result<std::vector<int64_t>> apply_chat_template(
      const std::vector<Message>& messages,
      bool add_generation_prompt,
      std::string_view variables = {}) const;

  /// Returns the ids that end an answer: `eos_token_id` of
  /// generation_config.json, or else the `eos_token` of tokenizer_config.json,
  /// or else none.
  std::vector<int64_t> eos_token_ids() const;

  /// Returns a detokenizer for one answer. The detokenizer may outlive the
  /// tokenizer.
  Detokenizer detokenizer(bool skip_special_tokens = true) const;

 private:
  struct Free {
    void operator()(bridge::Tokenizer* raw) const;
  };
  explicit Tokenizer(bridge::Tokenizer* raw) : raw_(raw) {}

  std::unique_ptr<bridge::Tokenizer, Free> raw_;
};

/// Refuses variables of a chat template that are not a JSON object.
Result<void> check_template_variables(std::string_view variables);

} // namespace etkv::examples
