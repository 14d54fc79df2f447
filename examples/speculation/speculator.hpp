// Speculative decoding: a draft proposes a tree of ids, the model verifies it in
// one forward, and both keep the chain that the model agrees with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "examples/common/arguments.hpp"
#include "examples/common/generator.hpp"
#include "examples/common/model.hpp"
#include "examples/speculation/draft.hpp"
#include "examples/speculation/tuner.hpp"

namespace etkv::examples {

/// What a runner can be asked about speculation.
struct SpeculationOptions {
  /// A program, or "ngram".
  std::optional<std::string> draft;
  /// None to tune them.
  std::optional<int64_t> depth;
  std::optional<int64_t> width;
};

/// Adds them to a command line.
void add_speculation_arguments(
    Arguments& arguments,
    SpeculationOptions& options,
    const std::string& otherwise);

/// The draft that was asked for.
Result<std::unique_ptr<Draft>> make_draft(
    const std::string& name,
    const ModelOptions& options,
    const Model& target,
    const Cache& cache);

class Speculator : public Stepper {
 public:
  /// What the steps took.
  struct Statistics {
    int64_t steps = 0;
    /// Ids that came of them, and how many of these the draft had drafted.
    int64_t ids = 0;
    int64_t accepted = 0;
    /// Candidates that were verified.
    int64_t candidates = 0;
    double seconds = 0.0;
    double draft_seconds = 0.0;
  };

  /// Borrows all of them; `target` is loaded with Logits::all, and bound to the
  /// cache, of which it uses sequence 0.
  Speculator(
      Model& target,
      TreeCache& cache,
      Draft& draft,
      const SpeculationOptions& options,
      Sampler sampler = Sampler());

  void read(int64_t position) override;
  Result<int64_t> first(const LogitsView& logits) override;
  Result<std::vector<int64_t>> next(
      const std::vector<int64_t>& text,
      size_t most) override;

  /// Since it was made, or since this was last asked.
  Statistics take_statistics();

 private:
  Result<VerificationResult> verify_in_one_forward(
      const TokenTree& tree,
      int64_t base);
  void cut_at_end(const TokenTree& tree, VerificationResult& verified) const;

  Model& target_;
  TreeCache& cache_;
  Draft& draft_;
  Tuner tuner_;
  Sampler sampler_;
  Statistics statistics_;
};

/// "47 tokens in 17 steps: 2.76 a step, 1.76 of 5.9 draft tokens accepted · …"
std::string describe(const Speculator::Statistics& statistics);

} // namespace etkv::examples
