// Shared by the tests of drafts: a target on a tree cache, drafts for it, and
// made-up rows of logits.
#pragma once

#include <cmath>

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

inline examples::Model open(const std::string& name) {
  examples::ModelOptions options;
  options.model = program_path(name);
  options.raw = true;
  return must(examples::Model::open(options));
}

using TreeSession = CacheSession<TreeCache>;

/// A target on a tree cache, ready for steps.
struct Target {
  explicit Target(
      const std::string& name = "llama-f32",
      int32_t capacity = 200,
      const std::string& format = "f32")
      : model(open(name)), session(make(model, capacity, format)) {
    must(model.program().load(session.key(), Logits::proposed));
  }
  static TreeSession
  make(examples::Model& model, int32_t capacity, const std::string& format) {
    auto config = make_config(model.program().params(), capacity, format, 4);
    return must(make_tree_session(kMLXBackend, config));
  }
  TreeCache& cache() {
    return session.cache();
  }

  examples::Model model;
  TreeSession session;
};

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

/// A prompt with repetitions to draft from.
inline Ids prompt() {
  Ids ids = text(9, 3);
  const Ids again = ids;
  ids.insert(ids.end(), again.begin(), again.end());
  return ids;
}

inline Ids reference_ids(const std::string& name, const Ids& prompt, size_t n) {
  On<Cache> on([](CacheConfig& config) { config.capacity = 200; }, name);
  Ids wanted;
  Rows rows;
  for (size_t at = 0; at < prompt.size(); at += kMaxTokens) {
    const size_t n = std::min<size_t>(kMaxTokens, prompt.size() - at);
    rows = on.model.at(static_cast<int64_t>(at), slice(prompt, at, n));
  }
  while (wanted.size() < n) {
    wanted.push_back(rows.best());
    rows = on.model.at(
        static_cast<int64_t>(prompt.size() + wanted.size()) - 1,
        {wanted.back()});
  }
  return wanted;
}

} // namespace etkv::tests
