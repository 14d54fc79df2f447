// A language model's program: opened, told which cache is its own, and run one
// step at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "etkv/executorch.hpp"
#include "examples/common/hidden_states.hpp"
#include "examples/common/logits.hpp"

namespace etkv::examples {

class Program {
 public:
  /// Opens a .pte file, and reads what it says of itself. Nothing of the model
  /// is loaded yet.
  static Result<Program> open(const std::string& path);

  /// Loads the model, bound to the cache with this key; one that is loaded
  /// already is unloaded first, so that its weights are never there twice. A
  /// program that cannot leave out rows of logits computes all of them.
  Result<void> load(const char* cache_key, Logits rows);

  /// Runs the model on `n` tokens at these positions, in the cache that it is
  /// bound to. The logits are valid until the next step. A draft that is fed with
  /// hidden states takes the other step.
  Result<LogitsView>
  step(const int64_t* tokens, const int64_t* positions, size_t n);

  /// The same for such a draft: a row of `given` for each token.
  Result<LogitsView> step(
      const int64_t* tokens,
      const int64_t* positions,
      size_t n,
      const GivenHiddenStates& given);

  /// A step at `position` and those that follow it.
  Result<LogitsView> step_at(const int64_t* tokens, int64_t position, size_t n);

  /// What the last step handed on, a row for each of its tokens; nothing where the
  /// program gives no hidden states. Valid until the next step.
  const std::optional<HiddenStatesView>& hidden_states() const {
    return hidden_states_;
  }

  const ModelCacheParams& params() const {
    return params_;
  }
  /// Tokens of a prompt that a step takes: as many as the program does, but
  /// fewer where each of them has a row of logits, which is as wide as the
  /// vocabulary and held twice.
  size_t prefill_size() const;

  int64_t vocabulary() const {
    return vocabulary_;
  }
  /// The KV format that loses nothing of what the model computes.
  const std::string& native_format() const {
    return native_format_;
  }
  /// The ids that end an answer, where the program tells them.
  const std::optional<std::vector<int64_t>>& eos_token_ids() const {
    return eos_token_ids_;
  }
  /// The layers whose hidden states it gives, side by side in this order.
  const std::vector<int64_t>& tap_layers() const {
    return tap_layers_;
  }
  /// The layer of the whole model whose hidden states it is fed with, where it is a
  /// draft of that model and not one by itself.
  const std::optional<int64_t>& draft_tap() const {
    return draft_tap_;
  }
  /// A row of the hidden states that it gives, and that it takes where it is a draft;
  /// nothing where it gives none.
  const std::optional<HiddenStateType>& hidden_state_type() const {
    return hidden_state_type_;
  }

 private:
  Program() = default;
  Result<void> read_facts();
  Result<void> read_signature();
  Result<void> read_hidden_states();
  Result<std::optional<std::vector<int64_t>>> read_integers(
      const std::string& name);
  Result<void> check_tokens(const int64_t* tokens, size_t n) const;
  Result<LogitsView> run(
      const std::vector<executorch::runtime::EValue>& inputs,
      size_t n);

  std::unique_ptr<executorch::extension::Module> module_;
  ModelCacheParams params_;
  int64_t vocabulary_ = 0;
  std::string native_format_;
  std::optional<std::vector<int64_t>> eos_token_ids_;
  std::vector<int64_t> tap_layers_;
  std::optional<int64_t> draft_tap_;
  std::optional<HiddenStateType> hidden_state_type_;
  std::optional<HiddenStatesView> hidden_states_;
  std::vector<int64_t> positions_;
  Logits rows_ = Logits::all;
};

/// Hears of each chunk of a prompt: the tokens done of how many, and the
/// chunk's logits. Returns whether to go on.
using OnChunk =
    std::function<bool(size_t done, size_t total, const LogitsView& logits)>;

/// Runs `n` tokens, at least one, from `position` on in steps of at most
/// `chunk`, or of the program's prefill_size() if that is 0.
///
/// @returns the logits of the last step; nothing if `on_chunk` stopped it. What
///          was done until then, or until an error, stays in the cache.
Result<std::optional<LogitsView>> prefill(
    Program& program,
    const int64_t* tokens,
    int64_t position,
    size_t n,
    size_t chunk,
    const OnChunk& on_chunk);

} // namespace etkv::examples
