// Answers of a model, token by token, on a cache that keeps what it can of the
// conversation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "etkv/etkv.hpp"
#include "examples/common/program.hpp"

namespace etkv::examples {

/// Why an answer ended.
enum class Stop {
  end,         ///< the model ended it
  limit,       ///< as many tokens as were asked for
  capacity,    ///< the cache is full
  interrupted, ///< the person had enough
};

/// An answer, and what it took.
struct Answer {
  /// What the model chose, the id that ended the answer among them.
  std::vector<int64_t> ids;
  Stop stop = Stop::limit;
  /// Positions of the prompt that the cache held already.
  size_t reused_tokens = 0;
  size_t prefill_tokens = 0;
  double prefill_seconds = 0.0;
  /// Steps of one token after the prompt.
  int64_t decode_steps = 0;
  double decode_seconds = 0.0;
};

/// Refuses a prompt that is empty, or longer than the cache.
Result<void> check_length(size_t prompt_tokens, const Cache& cache);

/// Follows an answer as it is made.
struct Listener {
  /// So much of the prompt is done; 0 before the first chunk.
  std::function<void(size_t done, size_t total)> on_prefill;
  /// The model chose a token that is a part of the answer.
  std::function<Result<void>(int64_t id)> on_token;
};

/// Greedy decoding. Knows which ids the cache holds, so that a prompt which
/// begins like them is read from there on only.
class Generator {
 public:
  /// Borrows both; `end_ids` end an answer.
  Generator(Program& program, Cache& cache, std::vector<int64_t> end_ids);

  /// Answers `prompt`, the whole conversation from its first token on.
  ///
  /// After an error, and after an interruption before the first token, the
  /// cache holds what it shared with the prompt before.
  Result<Answer> answer(
      const std::vector<int64_t>& prompt,
      int64_t max_new_tokens,
      const Listener& listener);

  /// Forgets what the cache holds beyond its first `length` ids.
  Result<void> rewind(size_t length);

  /// The ids whose keys and values the cache holds.
  const std::vector<int64_t>& held() const {
    return held_;
  }

 private:
  Result<void> run(
      const std::vector<int64_t>& prompt,
      int64_t max_new_tokens,
      const Listener& listener,
      Answer& answer);
  Result<void> decode(
      LogitsView logits,
      int64_t max_new_tokens,
      const Listener& listener,
      Answer& answer);
  bool ends(int64_t id) const;

  Program& program_;
  Cache& cache_;
  std::vector<int64_t> end_ids_;
  std::vector<int64_t> held_;
};

} // namespace etkv::examples
