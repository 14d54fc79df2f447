// A language model for runners: its program, its tokenizer, and the config of
// its cache.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "etkv/executorch.hpp"
#include "examples/common/arguments.hpp"
#include "examples/common/program.hpp"
#include "examples/tokenizer/tokenizer.hpp"

namespace etkv::examples {

/// The options of a model and its cache.
struct ModelOptions {
  /// The program; by default the program that `make model` exports.
  std::optional<std::string> model;
  /// The tokenizer; by default tokenizer.json next to the model.
  std::optional<std::string> tokenizer;
  /// The capacity of the cache; by default the context length that the program
  /// was exported for.
  std::optional<int64_t> capacity;
  /// The format of keys and values; by default the model's dtype.
  std::optional<std::string> kv_format;
  /// Whether texts are used without the chat template.
  bool raw = false;
  /// Additional variables of the chat template, as a JSON object.
  std::optional<std::string> template_variables;
  /// Whether special tokens of an answer are part of its text.
  bool show_special = false;
};

/// Adds the options of a model to a command line.
void add_model_arguments(Arguments& arguments, ModelOptions& options);

/// Adds the option `--kv-format`, which every runner has.
void add_format_argument(
    Arguments& arguments,
    std::optional<std::string>* format);

/// Refuses an unknown storage format. `option` is the name of the option that
/// set the format, for the message.
Result<void> check_format(
    const std::optional<std::string>& format,
    const std::string& option = "--kv-format");

class Model {
 public:
  /// Opens a program and its tokenizer. Does not load the weights.
  static Result<Model> open(
      const ModelOptions& options,
      GraphCache graph_cache = GraphCache::refused);

  /// Returns the backend that runs the program, for a session.
  const std::string& backend_id() const {
    return program_.params().backend_id;
  }

  /// Returns the capacity of the cache.
  int32_t capacity() const {
    return capacity_;
  }

  /// Returns the config of the cache, for a session.
  CacheConfig config() const {
    return make_config(program_.params(), capacity_, format_);
  }

  /// Returns the ids of a conversation in the chat template, including the
  /// start of the model's next message. With `raw`, returns the ids of the
  /// texts without the chat template.
  Result<std::vector<int64_t>> encode(
      const std::vector<Message>& messages) const;

  /// Returns the ids of one question.
  Result<std::vector<int64_t>> encode(const std::string& question) const {
    return encode({{"user", question}});
  }

  /// Returns the ids of a text without the chat template, with the tokenizer's
  /// first token (BOS).
  Result<std::vector<int64_t>> encode_text(const std::string& text) const;

  /// Removes the eos token id from an answer. The chat template adds the eos
  /// token itself.
  std::vector<int64_t> without_eos(std::vector<int64_t> ids) const;

  /// Returns the text of an answer.
  Result<std::string> decode(const std::vector<int64_t>& ids) const;

  /// Returns a detokenizer for one answer.
  Detokenizer detokenizer() const {
    return tokenizer_.detokenizer(/*skip_special_tokens=*/!show_special_);
  }

  /// Returns whether this id ends an answer.
  bool ends(int64_t id) const;

  /// Returns the file of the program.
  const std::string& path() const {
    return path_;
  }
  Program& program() {
    return program_;
  }
  const Program& program() const {
    return program_;
  }
  const Tokenizer& tokenizer() const {
    return tokenizer_;
  }
  const std::vector<int64_t>& eos_token_ids() const {
    return eos_token_ids_;
  }
  /// Replaces the eos token ids of the model's files.
  void end_with(std::vector<int64_t> ids) {
    eos_token_ids_ = std::move(ids);
  }
  /// Returns the format of keys and values.
  const std::string& format() const {
    return format_;
  }

 private:
  Model(std::string path, Program program, Tokenizer tokenizer)
      : path_(std::move(path)),
        program_(std::move(program)),
        tokenizer_(std::move(tokenizer)) {}

  std::string path_;
  Program program_;
  Tokenizer tokenizer_;
  std::vector<int64_t> eos_token_ids_;
  std::string format_;
  int32_t capacity_ = 0;
  std::string template_variables_;
  bool raw_ = false;
  bool show_special_ = false;
};

} // namespace etkv::examples
