// A language model as runners have it: its program, its text, and what a cache
// for it is to be.
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

/// Which model, and how much of a cache.
struct ModelOptions {
  /// None for the one that `make model` exports.
  std::optional<std::string> model;
  /// None for tokenizer.json beside the model.
  std::optional<std::string> tokenizer;
  /// None for all that the program was exported for.
  std::optional<int64_t> capacity;
  /// None for the model's own dtype.
  std::optional<std::string> kv_format;
  /// Texts are taken as they are, without the chat template.
  bool raw = false;
};

/// Adds the options of a model to a command line.
void add_model_arguments(Arguments& arguments, ModelOptions& options);

/// The option `--kv-format`, which any runner has.
void add_format_argument(
    Arguments& arguments,
    std::optional<std::string>* format);

/// Refuses a storage format that there is not.
Result<void> check_format(const std::optional<std::string>& format);

class Model {
 public:
  /// Opens a program and its tokenizer. Nothing of the model is loaded yet.
  static Result<Model> open(const ModelOptions& options);

  /// The cache that was asked for, for a session.
  CacheConfig config() const {
    return make_config(program_.params(), capacity_, format_);
  }

  /// The ids of a conversation, up to where the model's next message begins.
  /// Without a template, those of its texts.
  Result<std::vector<int64_t>> encode(
      const std::vector<Message>& messages) const;

  /// The ids of one question.
  Result<std::vector<int64_t>> encode(const std::string& question) const {
    return encode({{"user", question}});
  }

  /// The text of ids.
  Result<std::string> decode(const std::vector<int64_t>& ids) const;

  /// Whether this id ends an answer.
  bool ends(int64_t id) const;

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
  /// Has other ids end answers than those that the model's files name.
  void end_with(std::vector<int64_t> ids) {
    eos_token_ids_ = std::move(ids);
  }
  /// How keys and values are stored.
  const std::string& format() const {
    return format_;
  }

 private:
  Model(Program program, Tokenizer tokenizer)
      : program_(std::move(program)), tokenizer_(std::move(tokenizer)) {}

  Program program_;
  Tokenizer tokenizer_;
  std::vector<int64_t> eos_token_ids_;
  std::string format_;
  int32_t capacity_ = 0;
  bool raw_ = false;
};

} // namespace etkv::examples
