// A person and a model in conversation, on one cache.
#pragma once

#include <cstdint>
#include <string>

#include "etkv/etkv.hpp"
#include "examples/chat/conversation.hpp"
#include "examples/chat/options.hpp"
#include "examples/common/generator.hpp"
#include "examples/common/model.hpp"

namespace etkv::examples {

class Chat {
 public:
  /// Borrows all of them: a model that is loaded, and bound to the cache, and who
  /// steps where that is not one token at a time.
  Chat(
      Model& model,
      Cache& cache,
      const Options& options,
      Speculator* speculator = nullptr);

  /// Writes the model's answer to `said` as it is made, and then how it went.
  /// After an error the conversation is as it was.
  Result<Answer> ask(const std::string& said);

  /// Asks line by line until the person leaves.
  void converse();

 private:
  /// Follows a command; false to leave.
  bool follow(const std::string& command);
  void undo();
  void reset();
  void stats() const;
  void report() const;
  void report(const Answer& answer) const;

  Model& model_;
  Cache& cache_;
  const Options& options_;
  Speculator* speculator_;
  Generator generator_;
  Conversation conversation_;
  int64_t tokens_made_ = 0;
  int64_t tokens_read_ = 0;
  int64_t decode_tokens_ = 0;
  double decode_seconds_ = 0.0;
};

} // namespace etkv::examples
