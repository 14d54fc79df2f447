// Shared by the tests of runners: models on caches, drafts for them, and made-up
// rows of logits.
#pragma once

#include <cmath>

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

inline LogitsView view(const std::vector<float>& rows) {
  return {
      rows.data(),
      ScalarType::Float,
      static_cast<int64_t>(rows.size()) / kLetters,
      kLetters};
}

/// Opens a model for prompts of ids. No id ends an answer of this model.
inline examples::Model open(
    const std::string& name,
    std::optional<int64_t> capacity = std::nullopt) {
  examples::ModelOptions options;
  options.capacity = capacity;
  options.model = program_path(name);
  options.raw = true;
  auto model = must(examples::Model::open(options));
  model.end_with({});
  return model;
}

/// A model on a cache of the kind that the face has, ready for steps.
template <typename Face>
struct ModelOn {
  explicit ModelOn(
      const std::string& name = "tiny-llama-f32",
      int32_t capacity = 200,
      const Change& change = nullptr)
      : model(open(name)), session(make(model, capacity, change)) {
    must(model.program().load(session.key(), Logits::proposed));
  }
  static CacheSession<Face>
  make(examples::Model& model, int32_t capacity, const Change& change) {
    auto config = make_config(model.program().params(), capacity, "f32", 4);
    if (change) {
      change(config);
    }
    return must(CacheSession<Face>::make(kMLXBackend, config));
  }
  Face& cache() {
    return session.cache();
  }

  examples::Model model;
  CacheSession<Face> session;
};

/// The target of drafts.
using Target = ModelOn<TreeCache>;

inline std::unique_ptr<examples::Draft>
draft(const std::string& name, Target& target, int32_t capacity = 200) {
  if (name == "ngram") {
    return std::make_unique<NgramDraft>();
  }
  return must(
      examples::open_draft(
          program_path(name),
          {target.model.program().vocabulary(),
           capacity,
           std::nullopt,
           target.model.program().tap_layers(),
           target.model.program().hidden_state_type()}));
}

/// Answers with drafts of a target.
struct Speculation {
  Speculation(
      Target& target,
      examples::Draft& draft,
      std::optional<int64_t> depth,
      std::optional<int64_t> width)
      : speculator(target.model, target.cache(), draft, {{}, depth, width}),
        generator(
            target.model.program(),
            target.cache(),
            target.model.eos_token_ids(),
            &speculator) {}

  examples::Answer answer(const Ids& prompt, size_t n) {
    return must(generator.answer(
        prompt, static_cast<int64_t>(n), examples::Listener()));
  }

  examples::Speculator speculator;
  examples::Generator generator;
};

/// A prompt with repetitions to draft from.
inline Ids prompt() {
  return joined(text(9, 3), text(9, 3));
}

/// Returns `n` greedy ids after a prompt, one step each.
inline Ids reference_ids(
    const std::string& name,
    const Ids& prompt,
    size_t n,
    const Change& change = nullptr) {
  On<Cache> on(
      [&](CacheConfig& config) {
        config.capacity = 200;
        if (change) {
          change(config);
        }
      },
      name);
  Ids wanted = {on.model.read(prompt, kMaxTokens).best()};
  while (wanted.size() < n) {
    const auto position = static_cast<int64_t>(prompt.size() + wanted.size());
    wanted.push_back(on.at(position - 1, {wanted.back()}).best());
  }
  return wanted;
}

/// Whether two proposals are the same.
inline bool same(const TokenTree& a, const TokenTree& b) {
  return a.tokens == b.tokens && a.parents == b.parents;
}

} // namespace etkv::tests
