// Steps over several sequences of one cache, and what decodes in them.
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

/// Sequences of a cache have numbers below this.
inline constexpr int32_t kSequences = 256;

/// The tokens of one step: what they are, where they stand, whose they are.
class Batch {
 public:
  void add(int64_t token, int64_t position, int32_t sequence) {
    tokens_.push_back(token);
    positions_.push_back(position);
    sequences_.push_back(sequence);
  }

  /// Adds `n` tokens of one sequence, from `position` on.
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

  /// Runs the step. The logits have a row for each token, valid until the next.
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

/// A prompt in a sequence, and what the model chose after it.
struct Decoding {
  std::string title;
  std::vector<int64_t> prompt;
  int64_t max_tokens = 0;
  int32_t sequence = 0;
  /// Chosen so far. The last of them is not in the cache: it is what the next
  /// step runs.
  std::vector<int64_t> ids = {};
  /// Of all of them together, as a natural logarithm.
  double log_probability = 0.0;
  /// Why it ended; nothing while it goes on.
  std::optional<Stop> stop = std::nullopt;

  /// Where the last id stands.
  int64_t position() const {
    return static_cast<int64_t>(prompt.size() + ids.size()) - 1;
  }

  /// Takes the greatest logit of a row as the next id.
  Result<void> take(const Model& model, const LogitsView& logits, int64_t row);
};

/// Runs `ids` from the one numbered `held` on to the one before `end`, in a
/// sequence that holds those before. Returns the logits of the last step; nothing
/// after Ctrl-C, and where there is nothing to run.
Result<std::optional<LogitsView>> read_ids(
    Model& model,
    SeqCache& cache,
    int32_t sequence,
    const std::vector<int64_t>& ids,
    size_t held,
    size_t end);

/// Forgets what a sequence holds beyond its first `length` positions; all of it
/// where layers with windows have dropped what the next token would see. Returns
/// how many are left.
Result<size_t> cut(SeqCache& cache, int32_t sequence, size_t length);

/// Runs what `one` has behind the first `held` ids of its prompt, which its
/// sequence holds, and takes its first id; false after Ctrl-C.
Result<bool> begin(Model& model, SeqCache& cache, Decoding& one, size_t held);

/// The last id of each is run, and gives the next one of each: in one step, or in
/// as many as the program needs for so many tokens.
Result<void> step_together(
    Model& model,
    SeqCache& cache,
    const std::vector<Decoding*>& active);

/// Those that go on.
std::vector<Decoding*> unfinished(std::vector<Decoding>& all);

} // namespace etkv::examples
