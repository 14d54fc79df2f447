// Answers of a model, token by token, on a cache that keeps as much of the
// conversation as it can.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "etkv/etkv.hpp"
#include "examples/common/program.hpp"
#include "examples/common/text_cache.hpp"

namespace etkv::examples {

/// The reason why an answer ended.
enum class FinishReason {
  stop,      ///< the model ended it
  length,    ///< at the limit of tokens
  capacity,  ///< the cache is full
  cancelled, ///< at Ctrl-C
};

/// Returns why a generation ended an answer; nothing if the answer goes on.
std::optional<FinishReason> stop_of(End end);

/// An answer, with the tokens and the time that it took.
struct Answer {
  /// The ids that the model chose, the eos token id included.
  std::vector<int64_t> ids;
  FinishReason stop = FinishReason::length;
  /// Positions of the prompt that the cache held already.
  size_t reused_tokens = 0;
  size_t prefill_tokens = 0;
  double prefill_seconds = 0.0;
  /// Tokens after the first, and the steps that they took.
  int64_t decode_tokens = 0;
  int64_t decode_steps = 0;
  double decode_seconds = 0.0;
};

/// Refuses a prompt that is empty, or longer than a cache of this capacity.
Result<void> check_length(size_t prompt_tokens, int32_t capacity);

/// Callbacks while an answer is generated.
struct Listener {
  /// Called with the number of prompt tokens that have run; 0 before the first
  /// chunk.
  std::function<void(size_t done, size_t total)> on_prefill;
  /// Called with each token that the model chose for the answer.
  std::function<Result<void>(int64_t id)> on_token;
};

/// Continues a text, step by step.
class Stepper {
 public:
  virtual ~Stepper() = default;

  /// Called after each prefill chunk, with its first position. The program that
  /// ran it has its hidden states.
  virtual void read(int64_t /*position*/) {}

  /// Returns the id after a prompt, from the logits of its last token.
  virtual Result<int64_t> first(const LogitsView& logits) = 0;

  /// Makes a step after `text`. The cache holds all ids of `text` except the
  /// last.
  ///
  /// @returns the ids that follow, at least 1 and at most `most`. An eos token
  /// id is the last of them. The cache then holds all ids except the last.
  virtual Result<std::vector<int64_t>> next(
      const std::vector<int64_t>& text,
      size_t most) = 0;
};

/// Runs one token a step, and chooses the next one on the host.
class SamplingStepper : public Stepper {
 public:
  SamplingStepper(Program& program, Sampling sampling)
      : program_(program), sampling_(std::move(sampling)) {}

  /// Begins an answer to `prompt`, which has all tokens from the first on. Those
  /// from `start` on count as repeated, as for an etkv::Generation.
  void begin(std::vector<int64_t> prompt, size_t start);

  Result<int64_t> first(const LogitsView& logits) override;
  Result<std::vector<int64_t>> next(
      const std::vector<int64_t>& text,
      size_t most) override;

 private:
  Result<int64_t> choose(
      const LogitsView& logits,
      const std::vector<int64_t>& text);

  Program& program_;
  Sampling sampling_;
  std::vector<int64_t> prompt_;
  size_t start_ = 0;
  std::vector<float> row_;
};

/// Answers prompts. It keeps the ids that the cache holds. If a prompt begins
/// with them, only the rest of it runs.
///
/// Tokens of an MLX program are chosen on the device, by an etkv::Generation. A
/// program for the CPU, one with its cache in the graph, and one with a stepper
/// run step by step.
class Generator {
 public:
  /// Borrows its arguments, which must outlive it. `eos_token_ids` end an
  /// answer. A stepper chooses ids itself, and ignores `sampling`.
  Generator(
      Program& program,
      TextCache cache,
      std::vector<int64_t> eos_token_ids,
      Stepper* stepper = nullptr,
      Sampling sampling = {});
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;

  /// Answers `prompt`, the whole conversation from its first token on.
  ///
  /// After an error, and after an interruption before the first token, the
  /// cache holds the ids that it shares with the previous prompt, or nothing if
  /// it cannot rewind that far.
  Result<Answer> answer(
      const std::vector<int64_t>& prompt,
      int64_t max_tokens,
      const Listener& listener);

  /// Removes the positions from `length` on, or all of them if the cache cannot
  /// rewind that far. Returns how many are left.
  Result<size_t> rewind(size_t length);

  /// Notes that the cache now holds the keys and values of these ids.
  void hold(std::vector<int64_t> ids) {
    held_ = std::move(ids);
  }

  /// Returns the ids whose keys and values the cache holds.
  const std::vector<int64_t>& held() const {
    return held_;
  }

 private:
  Result<void> run(
      const std::vector<int64_t>& prompt,
      int64_t max_tokens,
      const Listener& listener,
      Answer& answer);
  Result<void> run_on_device(
      const std::vector<int64_t>& prompt,
      int64_t max_tokens,
      const Listener& listener,
      Answer& answer);
  Result<void> decode_on_device(
      Generation& generation,
      const Listener& listener,
      Answer& answer);
  Result<void> decode(
      Stepper& stepper,
      const LogitsView& logits,
      int64_t max_tokens,
      const Listener& listener,
      Answer& answer);
  bool ends(int64_t id) const;

  Program& program_;
  TextCache cache_;
  std::vector<int64_t> eos_token_ids_;
  Sampling sampling_;
  SamplingStepper own_stepper_;
  Stepper* stepper_;
  std::vector<int64_t> held_;
};

} // namespace etkv::examples
