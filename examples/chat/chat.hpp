// A person and a model in conversation, on one cache.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "etkv/etkv.hpp"
#include "examples/chat/conversation.hpp"
#include "examples/chat/generator.hpp"
#include "examples/chat/options.hpp"
#include "examples/common/program.hpp"
#include "examples/text/text.hpp"

namespace etkv::examples {

class Chat {
 public:
  /// What a chat borrows: opened, loaded and bound to each other.
  struct Parts {
    Program& program;
    Cache& cache;
    const Text& text;
    std::string format;
    std::vector<int64_t> end_ids;
  };

  Chat(Parts parts, const Options& options);

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
  void report(const Answer& answer) const;

  Parts parts_;
  const Options& options_;
  Generator generator_;
  Conversation conversation_;
  int64_t tokens_made_ = 0;
  int64_t tokens_read_ = 0;
  int64_t decode_steps_ = 0;
  double decode_seconds_ = 0.0;
};

} // namespace etkv::examples
