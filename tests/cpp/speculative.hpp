// Shared by the tests of runners: models on caches, drafts for them, and made-up
// rows of logits.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "examples/common/generator.hpp"
#include "examples/common/model.hpp"
#include "examples/speculation/drafts.hpp"
#include "examples/speculation/ngram.hpp"
#include "examples/speculation/speculator.hpp"
#include "fixture.hpp"

namespace etkv::tests {

using examples::Distribution;
using examples::LogitsView;
using examples::NgramDraft;
using examples::Rng;
using examples::Sampler;
using examples::TokenTree;
using examples::TreeShape;
using examples::VerificationResult;

/// The vocabulary of made-up languages.
inline constexpr int64_t kLetters = 6;

LogitsView view(const std::vector<float>& rows);

/// Opens a model for prompts of ids. No id ends an answer of this model.
examples::Model open(
    const std::string& name,
    std::optional<int64_t> capacity = std::nullopt);

/// A model on a cache of the kind that the face has, ready for steps.
template <typename Face>
struct ModelOn {
  explicit ModelOn(
      const std::string& name = "tiny-llama-f32",
      int32_t capacity = 200,
      const Change& change = nullptr);
  ~ModelOn();

  Face& cache() {
    return session.cache();
  }

  examples::Model model;
  CacheSession<Face> session;
};

/// The target of drafts.
using Target = ModelOn<TreeCache>;

std::unique_ptr<examples::Draft>
draft(const std::string& name, Target& target, int32_t capacity = 200);

/// Answers with drafts of a target.
struct Speculation {
  Speculation(
      Target& target,
      examples::Draft& draft,
      std::optional<int64_t> depth,
      std::optional<int64_t> width);

  examples::Answer answer(const Ids& prompt, size_t n);

  examples::Speculator speculator;
  examples::Generator generator;
};

/// A prompt with repetitions to draft from.
Ids prompt();

/// Returns `n` greedy ids after a prompt, one step each.
Ids reference_ids(
    const std::string& name,
    const Ids& prompt,
    size_t n,
    const Change& change = nullptr);

/// Whether two proposals are the same.
bool same(const TokenTree& a, const TokenTree& b);

} // namespace etkv::tests
