// How tokens are chosen, and answers of a loaded MLX program. A part of
// etkv.hpp.
//
//   auto answer = etkv::generate(
//       session.cache(), prompt, {}, [&](int64_t token, etkv::End) {
//         print(token);
//         return true; // false: enough
//       });
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "etkv/cache.hpp"
#include "etkv/detail.hpp"
#include "etkv/error.h"
#include "etkv/generation.h"
#include "etkv/result.hpp"

namespace etkv {

// ---- Sampling --------------------------------------------------------------

/// A number that is added to the logit of a token.
struct LogitBias {
  int64_t token = 0;
  float bias = 0.0F;
};

/// How a token is chosen; see etkv_sampling. Greedy by default.
struct Sampling {
  float temperature = 0.0F;
  int32_t top_k = 0;
  float top_p = 1.0F;
  float min_p = 0.0F;
  float repetition_penalty = 1.0F;
  int32_t repetition_context = 64;
  uint64_t seed = 0;
  std::vector<LogitBias> logit_bias = {};
};

namespace detail {
/// The sampling as the C struct. The struct points into this object.
class RawSampling {
 public:
  explicit RawSampling(const Sampling& sampling) {
    for (const auto& [token, bias] : sampling.logit_bias) {
      biases_.push_back({token, bias, 0});
    }
    raw_.struct_size = sizeof(raw_);
    raw_.temperature = sampling.temperature;
    raw_.top_p = sampling.top_p;
    raw_.min_p = sampling.min_p;
    raw_.repetition_penalty = sampling.repetition_penalty;
    raw_.top_k = sampling.top_k;
    raw_.repetition_context = sampling.repetition_context;
    raw_.seed = sampling.seed;
    raw_.logit_bias = biases_.data();
    raw_.n_logit_bias = biases_.size();
  }
  RawSampling(const RawSampling&) = delete;
  RawSampling& operator=(const RawSampling&) = delete;

  const etkv_sampling* get() const {
    return &raw_;
  }

 private:
  std::vector<etkv_logit_bias> biases_;
  etkv_sampling raw_{};
};
} // namespace detail

/// Chooses a token from the logits of a step that the host ran; see
/// etkv_sampling_choose. `text` has `n_text` tokens: the prompt's and those of
/// the answer so far. `n` is the number of the token in the answer.
inline Result<int64_t> choose(
    const Sampling& sampling,
    const float* logits,
    size_t n_logits,
    const int64_t* text,
    size_t n_text,
    uint64_t n,
    size_t answer = 0) {
  const detail::RawSampling raw(sampling);
  return detail::ask<int64_t>(
      etkv_sampling_choose,
      raw.get(),
      logits,
      n_logits,
      text,
      n_text,
      answer,
      n);
}

// ---- Answers ---------------------------------------------------------------

/// A text to continue.
struct Prompt {
  /// The tokens to append to those that the sequence already holds, at least
  /// one.
  std::vector<int64_t> tokens;
  /// The sequence to continue; 0 in a cache of one sequence.
  int32_t sequence = 0;
};

/// Whether a step starts before the host requests its token.
enum class RunAhead : etkv_run_ahead {
  automatic = ETKV_RUN_AHEAD_AUTO, ///< on a GPU
  never = ETKV_RUN_AHEAD_NEVER,    ///< when the host requests its token
  always = ETKV_RUN_AHEAD_ALWAYS,  ///< also on a CPU
};

/// The options of answers.
struct GenerationOptions {
  Sampling sampling = {};
  /// The maximum tokens of an answer.
  int32_t max_tokens = 256;
  /// Tokens that end an answer.
  std::vector<int64_t> stop = {};
  RunAhead run_ahead = RunAhead::automatic;
};

/// Why an answer ended.
enum class End : etkv_end {
  none = ETKV_END_NONE,         ///< it goes on
  stop = ETKV_END_STOP,         ///< the token is one that ends it
  length = ETKV_END_LENGTH,     ///< it has `max_tokens` tokens
  capacity = ETKV_END_CAPACITY, ///< the cache is full
};

/// A token of an answer.
struct Generated {
  /// The number of the prompt that it answers.
  size_t prompt = 0;
  int64_t token = 0;
  /// Why the answer ends with this token.
  End end = End::none;
};

/// Answers in progress; see etkv_generation.
class Generation {
 public:
  /// Prepares answers to prompts, each in its own sequence, by the program that
  /// was last loaded with the cache. Nothing runs yet.
  static Result<Generation> make(
      const Cache& cache,
      const std::vector<Prompt>& prompts,
      const GenerationOptions& options) {
    std::vector<etkv_prompt> given;
    for (const auto& prompt : prompts) {
      etkv_prompt raw{};
      raw.struct_size = sizeof(raw);
      raw.tokens = prompt.tokens.data();
      raw.n_tokens = prompt.tokens.size();
      raw.sequence = prompt.sequence;
      given.push_back(raw);
    }
    const detail::RawSampling sampling(options.sampling);
    etkv_generation_options raw{};
    raw.struct_size = sizeof(raw);
    raw.sampling = sampling.get();
    raw.stop = options.stop.data();
    raw.n_stop = options.stop.size();
    raw.max_tokens = options.max_tokens;
    raw.run_ahead = static_cast<etkv_run_ahead>(options.run_ahead);
    return detail::ask<etkv_generation*>(
               etkv_generation_new,
               cache.raw(),
               given.data(),
               given.size(),
               &raw)
        .transform([&](etkv_generation* generation) {
          return Generation(generation, prompts.size());
        });
  }

  /// Runs the next step of the prompts. Returns the number of prompt tokens
  /// that have not run; next() runs these tokens.
  Result<size_t> read_prompts() {
    return detail::ask<size_t>(etkv_generation_read_prompts, raw());
  }

  /// Returns the next token of each answer that goes on; none if all have
  /// ended.
  Result<std::vector<Generated>> next() {
    std::vector<int64_t> tokens(n_prompts_);
    std::vector<etkv_end> ends(n_prompts_);
    auto found = detail::ask<size_t>(
        etkv_generation_next, raw(), tokens.data(), ends.data(), n_prompts_);
    if (!found.ok()) {
      return found.error();
    }
    std::vector<Generated> generated;
    for (size_t prompt = 0; prompt < n_prompts_; ++prompt) {
      if (tokens[prompt] >= 0) {
        generated.push_back(
            {prompt, tokens[prompt], static_cast<End>(ends[prompt])});
      }
    }
    return generated;
  }

  /// Ends the answers after the running step, from any thread: next() then
  /// returns no tokens. The cache holds the steps that were done.
  Result<void> cancel() const {
    return detail::run(etkv_generation_cancel, raw());
  }

  /// Rolls back a step of async decode, if there is one.
  Result<void> pause() {
    return detail::run(etkv_generation_pause, raw());
  }

  etkv_generation* raw() const {
    return handle_.get();
  }

 private:
  Generation(etkv_generation* raw, size_t n_prompts)
      : handle_(raw), n_prompts_(n_prompts) {}

  detail::Handle<etkv_generation, etkv_generation_free> handle_;
  size_t n_prompts_;
};

/// Answers a prompt with an MLX program. (For a CPU program the host chooses
/// tokens with etkv::choose.) `on_token` receives each token, and the reason if
/// the answer ends with this token. `on_token` returns false to stop. The cache
/// then holds the prompt, and all tokens of the answer except the last. Use a
/// Generation to stop during the prompt, or from another thread.
///
/// @returns the tokens of the answer, including one that stops it.
inline Result<std::vector<int64_t>> generate(
    const Cache& cache,
    std::vector<int64_t> prompt,
    const GenerationOptions& options,
    const std::function<bool(int64_t token, End end)>& on_token = {}) {
  std::vector<Prompt> prompts(1);
  prompts[0].tokens = std::move(prompt);
  auto generation = Generation::make(cache, prompts, options);
  if (!generation.ok()) {
    return generation.error();
  }
  std::vector<int64_t> answer;
  for (;;) {
    const auto next = generation->next();
    if (!next.ok()) {
      return next.error();
    }
    if (next->empty()) {
      return answer;
    }
    const auto& [_, token, end] = next->front();
    answer.push_back(token);
    if (on_token && !on_token(token, end)) {
      return answer;
    }
  }
}

/// Runs one step of the program that was last loaded with the cache, and
/// returns the argmax of each token's logits; see etkv_generation_choose. The
/// number of positions is the number of tokens.
inline Result<std::vector<int64_t>> choose(
    const Cache& cache,
    const std::vector<int64_t>& tokens,
    const std::vector<int32_t>& positions) {
  if (tokens.empty() || tokens.size() != positions.size()) {
    return Error(
        ETKV_ERROR_INVALID_ARGUMENT,
        std::to_string(tokens.size()) + " tokens at " +
            std::to_string(positions.size()) +
            " positions; expected at least 1 token, and a position for each");
  }
  std::vector<int64_t> chosen(tokens.size());
  auto done = detail::run(
      etkv_generation_choose,
      cache.raw(),
      tokens.data(),
      positions.data(),
      tokens.size(),
      chosen.data());
  if (!done.ok()) {
    return done.error();
  }
  return chosen;
}

/// Warms up the program that was last loaded with the cache; see
/// etkv_generation_warm_up. `on_progress` receives the number of steps done,
/// and the total.
inline Result<void> warm_up(
    const Cache& cache,
    const std::function<void(size_t done, size_t steps)>& on_progress = {}) {
  const auto call = [](void* context, size_t done, size_t steps) {
    const auto& progress =
        *static_cast<const std::function<void(size_t, size_t)>*>(context);
    if (progress) {
      progress(done, steps);
    }
  };
  return detail::run(
      etkv_generation_warm_up,
      cache.raw(),
      call,
      const_cast<std::function<void(size_t, size_t)>*>(&on_progress));
}

} // namespace etkv
