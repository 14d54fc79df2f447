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
  /// Tokens after the first, and the steps that they took.
  int64_t decode_tokens = 0;
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

/// How a text goes on, step by step.
class Stepper {
 public:
  virtual ~Stepper() = default;

  /// A prefill chunk was run, from this position on; the program that ran it
  /// tells its hidden states.
  virtual void read(int64_t /*position*/) {}

  /// The id behind a prompt, by the logits of its last token.
  virtual Result<int64_t> first(const LogitsView& logits) = 0;

  /// Makes a step behind `text`, of which the cache holds all but the last id.
  ///
  /// @returns the ids that follow, at least 1 and at most `most`. One that ends an
  ///          answer is the last of them. The cache then holds all but the last.
  virtual Result<std::vector<int64_t>> next(
      const std::vector<int64_t>& text,
      size_t most) = 0;
};

/// One token a step, the greatest logit each time.
class GreedyStepper : public Stepper {
 public:
  explicit GreedyStepper(Program& program) : program_(program) {}

  Result<int64_t> first(const LogitsView& logits) override;
  Result<std::vector<int64_t>> next(
      const std::vector<int64_t>& text,
      size_t most) override;

 private:
  Program& program_;
};

/// Answers prompts. Knows which ids the cache holds, so that a prompt which begins
/// like them is read from there on only.
class Generator {
 public:
  /// Borrows all of them; `eos_token_ids` end an answer. Steps greedily without a
  /// stepper.
  Generator(
      Program& program,
      Cache& cache,
      std::vector<int64_t> eos_token_ids,
      Stepper* stepper = nullptr);
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;

  /// Answers `prompt`, the whole conversation from its first token on.
  ///
  /// After an error, and after an interruption before the first token, the
  /// cache holds what it shared with the prompt before, as far as it can go back.
  Result<Answer> answer(
      const std::vector<int64_t>& prompt,
      int64_t max_tokens,
      const Listener& listener);

  /// Forgets what the cache holds beyond its first `length` ids; all of it where
  /// layers with windows have dropped what the next token would see. Returns how
  /// many are left.
  Result<size_t> rewind(size_t length);

  /// The ids whose keys and values the cache holds.
  const std::vector<int64_t>& held() const {
    return held_;
  }

 private:
  Result<void> run(
      const std::vector<int64_t>& prompt,
      int64_t max_tokens,
      const Listener& listener,
      Answer& answer);
  Result<void> decode(
      const LogitsView& logits,
      int64_t max_tokens,
      const Listener& listener,
      Answer& answer);
  bool ends(int64_t id) const;

  Program& program_;
  Cache& cache_;
  std::vector<int64_t> eos_token_ids_;
  GreedyStepper greedy_;
  Stepper* stepper_;
  std::vector<int64_t> held_;
};

} // namespace etkv::examples
