// Steps with tokens of several sequences of one cache, and the requests that
// decode in these sequences.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "etkv/etkv.hpp"
#include "examples/common/generator.hpp"
#include "examples/common/model.hpp"
#include "examples/common/program.hpp"

namespace etkv::examples {

/// The number of sequences of a cache. They are numbered from 0.
inline constexpr int32_t kSequences = 256;

/// The tokens of one step, with their positions and sequences.
class Batch {
 public:
  void add(int64_t token, int64_t position, int32_t sequence) {
    tokens_.push_back(token);
    positions_.push_back(position);
    sequences_.push_back(sequence);
  }

  /// Adds `n` tokens of a sequence. The first one is at `position`.
  void
  add(const int64_t* tokens, size_t n, int64_t position, int32_t sequence) {
    for (size_t i = 0; i < n; ++i) {
      add(tokens[i], position + static_cast<int64_t>(i), sequence);
    }
  }

  size_t size() const {
    return tokens_.size();
  }
  bool empty() const {
    return tokens_.empty();
  }

  /// Runs the step. Returns a row of logits for each token, valid until the
  /// next step.
  Result<LogitsView> step(Program& program, SeqCache& cache) const {
    if (auto begun = cache.begin_step(sequences_); !begun.ok()) {
      return begun.error();
    }
    return program.step(tokens_.data(), positions_.data(), tokens_.size());
  }

 private:
  std::vector<int64_t> tokens_;
  std::vector<int64_t> positions_;
  std::vector<int32_t> sequences_;
};

/// A prompt in a sequence, and the ids that the model chose after it.
struct Decoding {
  std::string title;
  std::vector<int64_t> prompt;
  int64_t max_tokens = 0;
  int32_t sequence = 0;
  /// The ids so far. The last one is not in the cache: the next step runs it.
  std::vector<int64_t> ids = {};
  /// The natural logarithm of the joint probability of the answer's ids.
  double log_probability = 0.0;
  /// The reason that the answer ended; nullopt while it goes on.
  std::optional<FinishReason> stop = std::nullopt;

  /// Returns the position of the last id.
  int64_t position() const {
    return static_cast<int64_t>(prompt.size() + ids.size()) - 1;
  }

  /// Appends the index of the greatest logit of a row as the next id.
  Result<void> take(const Model& model, const LogitsView& logits, int64_t row);
};

/// Runs the ids at indices `held` to `end - 1`, in a sequence that holds the
/// ids before index `held`. Returns the logits of the last step; nullopt after
/// Ctrl-C, or if there are no ids to run.
Result<std::optional<LogitsView>> read_ids(
    Model& model,
    SeqCache& cache,
    int32_t sequence,
    const std::vector<int64_t>& ids,
    size_t held,
    size_t end);

/// Removes the positions of a sequence at or after `length`, or all positions
/// if layers with windows have dropped rows that the next token needs. Returns
/// the remaining length.
Result<size_t> cut(SeqCache& cache, int32_t sequence, size_t length);

/// Runs the rest of the prompt of `one`. The sequence holds the first `held`
/// ids of the prompt. Chooses the first id of the answer. Returns false after
/// Ctrl-C.
Result<bool> begin(Model& model, SeqCache& cache, Decoding& one, size_t held);

/// Runs the last id of each request, and chooses the next id of each. This
/// takes one step, or several if the requests outnumber the tokens that the
/// program accepts per step.
Result<void> step_together(
    Model& model,
    SeqCache& cache,
    const std::vector<Decoding*>& active);

/// Returns the requests that have not ended.
std::vector<Decoding*> unfinished(std::vector<Decoding>& all);

} // namespace etkv::examples
