// The text of a conversation, and the ids that a model reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "etkv/etkv.hpp"
#include "examples/common/model.hpp"

namespace etkv::examples {

/// Exchanges between a person and a model. With `raw` there are no messages,
/// only one text that the person and the model continue in turn.
class Conversation {
 public:
  Conversation(const Model& model, bool raw, std::optional<std::string> system);

  /// Returns the ids of the conversation so far, followed by `said`. Answers
  /// have the ids that the model chose. Changes nothing.
  Result<std::vector<int64_t>> prompt(const std::string& said) const;

  /// Adds an exchange.
  ///
  /// @param prompt  what prompt(said) returned
  /// @param ids     the model's ids, and
  /// @param answer  their text
  /// @param kept    the number of ids of the prompt that the cache already held
  void add(
      const std::string& said,
      std::vector<int64_t> prompt,
      const std::vector<int64_t>& ids,
      const std::string& answer,
      size_t kept);

  /// Undoes the last exchange. Returns the length to which the cache must be
  /// rewound, or nullopt if there is no exchange.
  std::optional<size_t> undo();

  /// Undoes every exchange.
  void reset();

  size_t exchanges() const {
    return exchanges_.size();
  }

 private:
  struct Exchange {
    std::string said;
    std::string answer;
    std::vector<int64_t> answer_ids;
    std::vector<int64_t> ids; // of the text, including this exchange
    size_t kept = 0;
  };

  const Model& model_;
  bool raw_;
  std::optional<std::string> system_;
  std::vector<Exchange> exchanges_;
};

} // namespace etkv::examples
