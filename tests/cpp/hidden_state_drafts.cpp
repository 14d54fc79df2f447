// Drafts that read the target's hidden states. Their proposals depend only on
// the text and its hidden states, not on earlier texts. They equal the choices
// of the draft's program when it runs one id after the other.

#include <algorithm>
#include <array>

#include "speculative.hpp"

namespace etkv::tests {
namespace {

using examples::Draft;
using examples::GivenHiddenStates;
using examples::HiddenStatesView;
using examples::HiddenStateType;
using examples::Program;

/// Hidden states of a text by reference decoding, a row for each id.
struct HiddenStates {
  HiddenStateType type;
  std::vector<std::byte> rows;

  HiddenStatesView view(size_t first, size_t n) const {
    return {rows.data() + first * type.bytes(), type, static_cast<int64_t>(n)};
  }
};

HiddenStates hidden_states_of(Target& target, const Ids& text) {
  must(target.cache().clear());
  Program& program = target.model.program();
  HiddenStates found{*program.hidden_state_type(), {}};
  for (size_t at = 0; at < text.size(); at += kMaxTokens) {
    const size_t n = std::min<size_t>(kMaxTokens, text.size() - at);
    must(program.step_at(text.data() + at, static_cast<int64_t>(at), n));
    const auto& made = *program.hidden_states();
    CHECK_INT(made.rows, n);
    found.rows.insert(
        found.rows.end(), made.data, made.data + n * found.type.bytes());
  }
  return found;
}

/// Returns the proposal of a new draft with the hidden states of this text.
TokenTree fresh(
    const std::string& name,
    Target& target,
    const Ids& text,
    const TreeShape& shape) {
  const auto hidden_states = hidden_states_of(target, text);
  const auto proposer = draft(name, target);
  // A tuner needs the draft's costs before the first tree.
  CHECK(proposer->seconds(1, 1) > 0.0);
  proposer->saw(0, hidden_states.view(0, text.size() - 1));
  Sampler greedy;
  return must(proposer->propose(text, shape, greedy));
}

/// A draft that records the proposals of another.
class Recorder : public Draft {
 public:
  struct Proposal {
    Ids text;
    TreeShape shape;
    TokenTree tree;
  };
  explicit Recorder(std::unique_ptr<Draft> draft) : draft_(std::move(draft)) {}

  Result<TokenTree>
  propose(const Ids& text, const TreeShape& shape, Sampler& sampler) override {
    auto tree = draft_->propose(text, shape, sampler);
    if (tree.ok()) {
      made.push_back({text, shape, tree.value()});
    }
    return tree;
  }
  Result<void> commit(const std::vector<int32_t>& accepted) override {
    return draft_->commit(accepted);
  }
  void saw(int64_t position, const HiddenStatesView& hidden_states) override {
    draft_->saw(position, hidden_states);
  }
  double seconds(int64_t depth, int64_t width) const override {
    return draft_->seconds(depth, width);
  }

  std::vector<Proposal> made;

 private:
  std::unique_ptr<Draft> draft_;
};

/// Conversations that continue, rewind and restart, with trees of every shape.
/// The answers equal reference decoding, and each tree equals that of a fresh
/// draft.
///
/// @param untapped  the same model without hidden states
void as_if_fresh(
    const std::string& untapped,
    const std::string& model,
    const std::string& name) {
  Target target(model);
  Recorder proposer(draft(name, target));
  const Ids long_text = text(90, 5);
  const Ids other = joined(slice(long_text, 0, 20), text(25, 6));
  const std::array<Ids, 5> prompts = {
      prompt(), long_text, slice(long_text, 0, 40), other, {7}};
  int64_t turn = 0;
  for (const Ids& asked : prompts) {
    const int64_t depth = 1 + turn % 6;
    const int64_t width = std::array<int64_t, 3>{3, 1, 8}[turn % 3];
    ++turn;
    Speculation speculation(target, proposer, depth, width);
    must(target.cache().clear());
    auto answer = speculation.answer(asked, 20);
    CHECK(answer.ids == reference_ids(untapped, asked, 20));
    // A text that continues from the middle of the answer, with another id.
    Ids longer = joined(asked, slice(answer.ids, 0, 9));
    longer.push_back((answer.ids[9] + 1) % kVocabulary);
    answer = speculation.answer(longer, 12);
    CHECK(answer.ids == reference_ids(untapped, longer, 12));
    CHECK_INT(answer.reused_tokens, longer.size() - 1);
  }
  REQUIRE(proposer.made.size() > 40);
  Target alone(model);
  size_t nodes = 0;
  for (const auto& one : proposer.made) {
    CHECK(same(one.tree, fresh(name, alone, one.text, one.shape)));
    nodes += one.tree.size() - 1;
  }
  std::printf(
      "%s: %zu trees of %zu draft tokens\n",
      name.c_str(),
      proposer.made.size(),
      nodes);
}

/// Compares with a chain of likeliest ids from the draft's program on a
/// contiguous cache. The inputs for ids of the text are the target's hidden
/// states; for later ids, the program's output for the id before.
void chains_by_hand() {
  constexpr int64_t kDepth = 5;
  Target target("tiny-llama-f32-taps-0");
  auto program = must(Program::open(program_path("tiny-llama-f32-draft1")));
  auto session = must(make_decode_session(
      kMLXBackend, make_config(program.params(), 100, "f32", 4)));
  must(program.load(session.key(), Logits::all));
  const size_t bytes = program.hidden_state_type()->bytes();
  for (const size_t n : {1, 2, 18, 40}) {
    const Ids ids = text(static_cast<int64_t>(n), 11);
    const auto hidden_states = hidden_states_of(target, ids);
    const auto step =
        [&](int64_t id, size_t at, const std::byte* row, bool own) {
          GivenHiddenStates given;
          given.add(row, bytes, own);
          const auto position = static_cast<int64_t>(at);
          return must(
              examples::argmax(
                  must(program.step(&id, &position, 1, given)), /*row=*/0));
        };
    must(session.cache().clear());
    for (size_t i = 0; i + 1 < n; ++i) {
      step(ids[i], i, hidden_states.view(i, 1).data, /*own=*/true);
    }
    std::vector<std::byte> row(bytes);
    if (n > 1) {
      const auto* before = hidden_states.view(n - 2, 1).data;
      row.assign(before, before + bytes);
    }
    Ids chain = {ids.back()};
    while (chain.size() <= kDepth) {
      chain.push_back(
          step(chain.back(), n + chain.size() - 2, row.data(), /*own=*/false));
      const auto* made = program.hidden_states()->data;
      row.assign(made, made + bytes);
    }
    CHECK(
        fresh("tiny-llama-f32-draft1", target, ids, {kDepth, 1, 32}).tokens ==
        chain);
  }
}

/// Missing hidden states are errors.
void missing_hidden_states() {
  const TreeShape shape = {2, 2, 32};
  const Ids ids = text(30, 4);
  Target target("tiny-llama-f32-taps-0");
  const auto hidden_states = hidden_states_of(target, ids);
  const auto proposer = draft("tiny-llama-f32-draft1", target);
  Sampler greedy;
  const auto refused = [&](int64_t position) {
    CHECK_REFUSED(
        proposer->propose(ids, shape, greedy),
        ETKV_ERROR_INVALID_ARGUMENT,
        ("the draft: the model's hidden states of position " +
         std::to_string(position) + " are missing")
            .c_str());
  };
  refused(0);
  proposer->saw(0, hidden_states.view(0, 10));
  refused(10);
  // A gap.
  proposer->saw(11, hidden_states.view(11, 18));
  refused(10);
  proposer->saw(10, hidden_states.view(10, 19));
  const auto tree = must(proposer->propose(ids, shape, greedy));
  CHECK(same(tree, fresh("tiny-llama-f32-draft1", target, ids, shape)));
  // New rows replace old rows of the same and later positions.
  proposer->saw(5, hidden_states.view(5, 1));
  refused(6);
  proposer->saw(6, hidden_states.view(6, 23));
  CHECK(same(must(proposer->propose(ids, shape, greedy)), tree));
  // The cache holds rows computed from the old states.
  const auto others = hidden_states_of(target, text(30, 9));
  proposer->saw(0, others.view(0, 29));
  const auto newly = draft("tiny-llama-f32-draft1", target);
  newly->saw(0, others.view(0, 29));
  const auto strange = must(proposer->propose(ids, shape, greedy));
  CHECK(same(strange, must(newly->propose(ids, shape, greedy))));
  CHECK(!same(strange, tree));
  // A shorter text drops the hidden states after it.
  must(proposer->propose(slice(ids, 0, 20), shape, greedy));
  refused(19);
}

/// Rows have the states of several layers. The draft uses the states of its
/// input layer.
void one_of_several_taps() {
  const TreeShape shape = {3, 2, 32};
  Target two("tiny-llama-f32-taps-1-0");
  Target one("tiny-llama-f32-taps-0");
  CHECK_INT(two.model.program().tap_layers().size(), 2);
  CHECK(same(
      fresh("tiny-llama-f32-draft1", two, prompt(), shape),
      fresh("tiny-llama-f32-draft1", one, prompt(), shape)));
}

void refusals() {
  const auto path = program_path("tiny-llama-f32-draft1");
  const HiddenStateType type{ScalarType::Float, 64};
  const auto open = [&](std::vector<int64_t> taps, HiddenStateType type) {
    return examples::open_draft(path, {320, 64, {}, std::move(taps), type});
  };
  auto program = must(Program::open(path));
  REQUIRE(*program.hidden_state_type() == type);
  CHECK_REFUSED(
      open({}, type),
      ETKV_ERROR_PROGRAM,
      "the draft: it needs the hidden states of layer 0, and the model returns "
      "none: "
      "export the model with --tap-layers 0");
  CHECK_REFUSED(
      open({1}, type),
      ETKV_ERROR_PROGRAM,
      "of layer 0, and the model returns those of layer 1: export");
  CHECK_REFUSED(
      open({0}, {ScalarType::BFloat16, 64}),
      ETKV_ERROR_PROGRAM,
      "64 elements of Float, and the model returns hidden states of 64 "
      "elements of BFloat16");
  CHECK_REFUSED(
      open({0}, {ScalarType::Float, 32}),
      ETKV_ERROR_PROGRAM,
      "the model returns hidden states of 32 elements of Float");
  CHECK_REFUSED(
      examples::open_draft(path, {1000, 64, {}, {0}, type}),
      ETKV_ERROR_PROGRAM,
      "a vocabulary of 320 ids, and the model one of 1000");
  const int64_t zero = 0;
  CHECK_REFUSED(
      program.step(&zero, &zero, 1),
      ETKV_ERROR_INVALID_ARGUMENT,
      "is a draft of a model: give it with --draft");
  GivenHiddenStates given;
  CHECK_REFUSED(
      program.step(&zero, &zero, 1, given),
      ETKV_ERROR_SHAPE,
      "0 bytes of hidden states for 1 tokens; a row of them is 64 elements of "
      "Float");
  examples::ModelOptions options;
  options.model = path;
  options.raw = true;
  CHECK_REFUSED(
      examples::Model::open(options),
      ETKV_ERROR_INVALID_ARGUMENT,
      "is a draft of a model: give it with --draft");
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  as_if_fresh(
      "tiny-llama-f32", "tiny-llama-f32-taps-0", "tiny-llama-f32-draft1");
  as_if_fresh(
      "tiny-llama-f32",
      "tiny-llama-f32-taps-0",
      "tiny-llama-f32-draft1-chunk4");
  as_if_fresh(
      "tiny-mistral-window-f32",
      "tiny-mistral-window-f32-taps-0",
      "tiny-mistral-window-f32-draft1");
  chains_by_hand();
  missing_hidden_states();
  one_of_several_taps();
  refusals();
  return check_report();
}
