// A conversation of a person and a model, on one cache.
#pragma once

#include <cstdint>
#include <string>

#include "etkv/etkv.hpp"
#include "examples/chat/conversation.hpp"
#include "examples/chat/options.hpp"
#include "examples/chat/stored_texts.hpp"
#include "examples/common/generator.hpp"
#include "examples/common/model.hpp"

namespace etkv::examples {

class Chat {
 public:
  /// Borrows its arguments: a loaded model with its cache, the speculator if
  /// there is a draft, and the stored texts if there is a store.
  Chat(
      Model& model,
      TextCache cache,
      const Options& options,
      Speculator* speculator = nullptr,
      StoredTexts* stored = nullptr);

  /// Prints the model's answer to the message `said` while it is generated,
  /// then statistics. After an error the conversation is as before.
  Result<Answer> ask(const std::string& said);

  /// Answers line after line until the person leaves.
  void converse();

 private:
  /// Executes a command; returns false to leave.
  bool follow(const std::string& command);
  void undo();
  void reset();
  void stats() const;
  void report() const;
  void report(const Answer& answer) const;
  /// Stores the contents of the cache.
  void store();
  Result<std::string> describe_cache() const;

  Model& model_;
  TextCache cache_;
  const Options& options_;
  Speculator* speculator_;
  StoredTexts* stored_;
  Generator generator_;
  Conversation conversation_;
  int64_t tokens_made_ = 0;
  int64_t tokens_read_ = 0;
  int64_t decode_tokens_ = 0;
  double decode_seconds_ = 0.0;
};

} // namespace etkv::examples
