// Opens a language model's program, binds it to a cache, and runs it step by
// step.
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

/// Opens a .pte file and checks all of its tables. Does not load the weights.
Result<std::unique_ptr<executorch::extension::Module>> open_program_file(
    const std::string& path);

/// Whether a program may keep its KV cache in its graph.
enum class GraphCache { refused, allowed };

class Program {
 public:
  /// Opens a .pte file and reads its metadata. Does not load the weights.
  static Result<Program> open(
      const std::string& path,
      GraphCache graph_cache = GraphCache::refused);

  /// Loads the model, bound to the cache with this key. If the model is already
  /// loaded, unloads it first, so that its weights are never in memory twice. A
  /// program that cannot return the requested rows of logits returns all rows.
  Result<void>
  load(const char* cache_key, Logits rows, Passes passes = Passes::standard);

  /// Loads a model that keeps its cache in its graph. Refuses a program that
  /// keeps nothing between steps.
  Result<void> load_with_graph_cache(Logits rows);

  /// Returns whether the program reports no cache outside its graph.
  bool has_graph_cache() const {
    return params_.layers.empty();
  }

  /// Returns the number of positions in the graph's cache.
  int32_t length() const {
    return length_;
  }

  /// Empties the cache in the graph.
  Result<void> reset();

  /// Runs the model on `n` tokens at these positions, in its cache. The logits
  /// are valid until the next step. For a draft with hidden states as inputs,
  /// use the other `step`.
  Result<LogitsView>
  step(const int64_t* tokens, const int64_t* positions, size_t n);

  /// Runs a step of a draft with hidden states as inputs. `given` has a row of
  /// hidden states for each token.
  Result<LogitsView> step(
      const int64_t* tokens,
      const int64_t* positions,
      size_t n,
      const GivenHiddenStates& given);

  /// Runs a step at consecutive positions, the first at `position`.
  Result<LogitsView> step_at(const int64_t* tokens, int64_t position, size_t n);

  /// Returns the hidden states of the last step, a row for each token; nullopt
  /// if the program returns none. The rows are valid until the next step.
  const std::optional<HiddenStatesView>& hidden_states() const {
    return hidden_states_;
  }

  const ModelCacheParams& params() const {
    return params_;
  }
  /// Refuses ids outside the vocabulary.
  Result<void> check_ids(const int64_t* tokens, size_t n) const;

  /// Returns the maximum tokens of a prompt in one step: the program's limit,
  /// or fewer in two cases. If the program returns a row of logits for each
  /// token, steps are shorter, because a row is as wide as the vocabulary and
  /// is in memory twice. For a draft with hidden states as inputs, steps are
  /// shorter, because the warm-up of a draft has only short steps.
  size_t prefill_size() const;

  int64_t vocabulary() const {
    return vocabulary_;
  }
  /// Returns the KV format of the dtype that the model computes in.
  const std::string& native_format() const {
    return native_format_;
  }
  /// Returns the ids that end an answer, if the program reports them.
  const std::optional<std::vector<int64_t>>& eos_token_ids() const {
    return eos_token_ids_;
  }
  /// Returns the layers whose hidden states the program returns, concatenated
  /// in this order.
  const std::vector<int64_t>& tap_layers() const {
    return tap_layers_;
  }
  /// Returns the layer of the whole model whose hidden states are the draft's
  /// input; nullopt if the program is not a draft of another model.
  const std::optional<int64_t>& draft_tap() const {
    return draft_tap_;
  }
  /// Returns the type of a row of the hidden states that the program returns.
  /// The hidden states that a draft reads have the same type. Returns nullopt
  /// if there are no hidden states.
  const std::optional<HiddenStateType>& hidden_state_type() const {
    return hidden_state_type_;
  }

 private:
  Program() = default;
  Result<void> check_tokens(const int64_t* tokens, size_t n) const;
  Result<void> read_facts();
  Result<void> read_signature();
  Result<void> read_hidden_states();
  Result<std::optional<std::vector<int64_t>>> read_integers(
      const std::string& name);
  Result<int32_t> read_count(const std::string& name);
  Result<void> read_limits();
  bool tells_of_no_cache() const;
  Result<void> load_with(LoadOptions options, Logits rows);
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
  std::string buffers_;
  int32_t length_ = 0;
  Logits rows_ = Logits::all;
};

/// Called after each chunk of a prompt, with the number of tokens done, the
/// total, and the chunk's logits. Returns whether to go on.
using OnChunk =
    std::function<bool(size_t done, size_t total, const LogitsView& logits)>;

/// Runs `n` tokens in steps of at most `chunk` tokens. `n` is at least 1, and
/// the first token is at `position`. A `chunk` of 0 stands for the program's
/// prefill_size().
///
/// @returns the logits of the last step; nullopt if `on_chunk` returned false.
///          Chunks that ran earlier stay in the cache, even after an error.
Result<std::optional<LogitsView>> prefill(
    Program& program,
    const int64_t* tokens,
    int64_t position,
    size_t n,
    size_t chunk,
    const OnChunk& on_chunk);

} // namespace etkv::examples
