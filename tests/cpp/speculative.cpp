#include "speculative.hpp"

namespace etkv::tests {
namespace {

template <typename Face>
CacheSession<Face>
make(examples::Model& model, int32_t capacity, const Change& change) {
  auto config = make_config(model.program().params(), capacity, "f32", 4);
  if (change) {
    change(config);
  }
  return must(CacheSession<Face>::make(kMLXBackend, config));
}

} // namespace

LogitsView view(const std::vector<float>& rows) {
  return {
      rows.data(),
      ScalarType::Float,
      static_cast<int64_t>(rows.size()) / kLetters,
      kLetters};
}

examples::Model open(const std::string& name, std::optional<int64_t> capacity) {
  examples::ModelOptions options;
  options.capacity = capacity;
  options.model = program_path(name);
  options.raw = true;
  auto model = must(examples::Model::open(options));
  model.end_with({});
  return model;
}

template <typename Face>
ModelOn<Face>::ModelOn(
    const std::string& name,
    int32_t capacity,
    const Change& change)
    : model(open(name)), session(make<Face>(model, capacity, change)) {
  must(model.program().load(session.key(), Logits::proposed));
}

template <typename Face>
ModelOn<Face>::~ModelOn() = default;

template struct ModelOn<Cache>;
template struct ModelOn<SeqCache>;
template struct ModelOn<TreeCache>;

std::unique_ptr<examples::Draft>
draft(const std::string& name, Target& target, int32_t capacity) {
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

Speculation::Speculation(
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

examples::Answer Speculation::answer(const Ids& prompt, size_t n) {
  return must(
      generator.answer(prompt, static_cast<int64_t>(n), examples::Listener()));
}

Ids prompt() {
  return joined(text(9, 3), text(9, 3));
}

Ids reference_ids(
    const std::string& name,
    const Ids& prompt,
    size_t n,
    const Change& change) {
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

bool same(const TokenTree& a, const TokenTree& b) {
  return a.tokens == b.tokens && a.parents == b.parents;
}

} // namespace etkv::tests
