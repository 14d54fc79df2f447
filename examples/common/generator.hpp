// Generates answers token by token, on a cache that keeps as much of the
// conversation as possible.
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
  stop,      ///< an eos token id
  length,    ///< the limit of tokens
  capacity,  ///< the cache is full
  cancelled, ///< Ctrl-C
};

/// Returns the reason that an answer ended; nullopt if it goes on.
std::optional<FinishReason> stop_of(End end);

/// An answer, with counts of tokens and times.
struct Answer {
  /// The ids that the model chose, including the eos token id.
  std::vector<int64_t> ids;
  FinishReason stop = FinishReason::length;
  /// The number of prompt tokens that did not run, because the answer continued
  /// from them in the cache.
  size_t reused_tokens = 0;
  /// The number of tokens that the prompt has in common with the text in the
  /// cache, at least `reused_tokens`. The matching tokens after the first
  /// `reused_tokens` ran again, because the cache could not be rewound to every
  /// position.
  size_t matched_tokens = 0;
  size_t prefill_tokens = 0;
  double prefill_seconds = 0.0;
  /// The number of the answer's tokens after the first, and the number of steps
  /// that computed these.
  int64_t decode_tokens = 0;
  int64_t decode_steps = 0;
  double decode_seconds = 0.0;
};

/// Refuses a prompt that is empty, or longer than `capacity`.
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

  /// Called after each prefill chunk, with the position of the chunk's first
  /// token. The program then still has the chunk's hidden states.
  virtual void read(int64_t /*position*/) {}

  /// Returns the first id of the answer, from the logits of the prompt's last
  /// token.
  virtual Result<int64_t> first(const LogitsView& logits) = 0;

  /// Runs a step after `text`. The cache holds all ids of `text` except the
  /// last.
  ///
  /// @returns the next ids, 1 to `most`. Nothing follows an eos token id. After
  /// the call, the cache holds all ids except the last.
  virtual Result<std::vector<int64_t>> next(
      const std::vector<int64_t>& text,
      size_t most) = 0;
};

/// Runs one token per step, and chooses the next token on the host.
class SamplingStepper : public Stepper {
 public:
  SamplingStepper(Program& program, Sampling sampling)
      : program_(program), sampling_(std::move(sampling)) {}

  /// Begins an answer to `prompt`, which has all tokens of the text. Only
  /// tokens at or after index `start` are penalized as repeated, as in an
  /// etkv::Generation.
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

/// Answers prompts. It remembers the ids that the cache holds. If a prompt
/// begins with these ids, only the rest of the prompt runs.
///
/// An etkv::Generation chooses the tokens of an MLX program on the device.
/// Other programs run step by step, and the host chooses: CPU programs,
/// programs with a cache in the graph, and any program with a stepper.
class Generator {
 public:
  /// Borrows its arguments, so these must outlive the generator. Any of
  /// `eos_token_ids` ends an answer. A stepper chooses ids itself, and ignores
  /// `sampling`.
  Generator(
      Program& program,
      TextCache cache,
      std::vector<int64_t> eos_token_ids,
      Stepper* stepper = nullptr,
      Sampling sampling = {});
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;

  /// Answers `prompt`: the ids of the whole conversation from its start,
  /// including the tokenizer's first token (BOS).
  ///
  /// After an error or an interruption before the answer's first token, the
  /// cache is rewound to the ids that the prompt shares with the previous text,
  /// or to fewer ids if it cannot be rewound to the end of these.
  Result<Answer> answer(
      const std::vector<int64_t>& prompt,
      int64_t max_tokens,
      const Listener& listener);

  /// Returns how many tokens of `prompt` the cache holds. The last token does
  /// not count: it always runs, because its logits were not kept.
  size_t matched(const std::vector<int64_t>& prompt) const;

  /// Removes the positions at or after `length`, and earlier positions if the
  /// cache cannot be rewound to `length`. Returns the remaining length.
  Result<size_t> rewind(size_t length);

  /// Records that the cache now holds the keys and values of these ids.
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
