// Speculative decoding: a draft proposes a tree of ids, the model verifies it
// in one forward, and both keep the chain that the model accepts.
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

/// The options of speculation.
struct SpeculationOptions {
  /// A program, or "ngram".
  std::optional<std::string> draft;
  /// Depth and width; empty to tune them.
  std::optional<int64_t> depth;
  std::optional<int64_t> width;
};

/// Adds the options to a command line.
void add_speculation_arguments(
    Arguments& arguments,
    SpeculationOptions& options,
    const std::string& otherwise);

/// Returns the draft of this name.
Result<std::unique_ptr<Draft>> make_draft(
    const std::string& name,
    const ModelOptions& options,
    const Model& target,
    const Cache& cache);

class Speculator : public Stepper {
 public:
  /// Statistics of steps.
  struct Statistics {
    int64_t steps = 0;
    /// The number of ids that the steps added, and how many of them the draft
    /// proposed.
    int64_t ids = 0;
    int64_t accepted = 0;
    /// The number of verified candidates.
    int64_t candidates = 0;
    double seconds = 0.0;
    double draft_seconds = 0.0;
  };

  /// Borrows its arguments. `target` must be loaded with Logits::proposed or
  /// Logits::all, and bound to the cache. Uses sequence 0 of the cache.
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

  /// Returns the statistics since the last call, or since the start.
  Statistics take_statistics();

 private:
  Result<VerificationResult> verify_in_one_forward(
      const TokenTree& tree,
      int64_t base);
  Result<VerificationResult> verify_on_host(
      const TokenTree& tree,
      int64_t base);
  Result<VerificationResult> verify_on_device(
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

/// "47 tokens after the first in 17 steps: 2.76 a step, 1.76 of 5.9 draft tokens accepted · …"
std::string describe(const Speculator::Statistics& statistics);

} // namespace etkv::examples
