// Draft tokens and their verification: every greedy answer equals that of
// reference decoding.

#include <map>
#include <optional>
#include <set>

#include "speculative.hpp"

namespace etkv::tests {
namespace {

// ---- Greedy verification of made-up logits
// ---------------------------------------------------

void greedy_verification() {
  TokenTree tree(5);
  const int32_t a = tree.add(1, 0);
  const int32_t b = tree.add(2, 0);
  const int32_t c = tree.add(3, b);
  tree.add(4, a);
  CHECK(tree.positions(10) == (Ids{10, 11, 11, 12, 12}));
  CHECK(tree.children(0) == (std::vector<int32_t>{a, b}));
  // `best` has the argmax after each node.
  const auto verified = [&](const Ids& best) {
    std::vector<float> rows(best.size() * kLetters, 0.0F);
    for (size_t i = 0; i < best.size(); ++i) {
      rows[i * kLetters + static_cast<size_t>(best[i])] = 1.0F;
    }
    Sampler sampler;
    return must(examples::verify(tree, view(rows), sampler));
  };
  const auto accepted = [&](const Ids& best) {
    return verified(best).accepted;
  };
  CHECK(accepted({2, 0, 3, 0, 0}) == (std::vector<int32_t>{0, b, c}));
  CHECK_INT(verified({2, 0, 3, 4, 0}).next, 4);
  CHECK(accepted({2, 4, 1, 0, 0}) == (std::vector<int32_t>{0, b}));
  CHECK_INT(verified({2, 4, 1, 0, 0}).next, 1);
  CHECK(accepted({3, 4, 3, 0, 0}) == (std::vector<int32_t>{0}));
  CHECK_INT(verified({3, 4, 3, 0, 0}).next, 3);
}

// ---- Draft tokens from the text ----------------------------------------------------------

void ngrams() {
  const auto grow = [](const Ids& text, int64_t depth, int64_t width) {
    return NgramDraft::grow(text, {depth, width, 64});
  };
  // The ids 9 1 followed 7 8. A single id is no match.
  CHECK(grow({7, 8, 9, 1, 7, 8}, 2, 1).tokens == (Ids{8, 9, 1}));
  CHECK(grow({7, 8, 9, 1, 8}, 2, 1).tokens == (Ids{8}));
  CHECK(grow({7}, 3, 3).tokens == (Ids{7}));
  CHECK(grow({7, 8, 9, 1, 7, 8}, 0, 1).tokens == (Ids{8}));
  // Of two continuations, the later one comes first. A wider tree has both.
  const Ids twice = {7, 8, 1, 0, 7, 8, 2, 0, 7, 8};
  CHECK(grow(twice, 1, 1).tokens == (Ids{8, 2}));
  const auto both = grow(twice, 2, 2);
  CHECK(both.tokens == (Ids{8, 2, 1, 0, 0}));
  CHECK(both.parents == (std::vector<int32_t>{-1, 0, 0, 1, 2}));
  // A longer match outweighs a later one.
  CHECK(grow({5, 7, 8, 1, 6, 7, 8, 2, 5, 7, 8}, 1, 1).tokens == (Ids{8, 1}));
  // A repetition goes on past the end.
  CHECK(grow({1, 2, 3, 1, 2, 3, 1, 2}, 5, 1).tokens == (Ids{2, 3, 1, 2, 3, 1}));
  // The tree has at most the requested number of nodes.
  CHECK_INT(NgramDraft::grow(twice, {3, 2, 3}).size(), 3);
}

/// A periodic text is drafted to the requested depth.
void repetition() {
  const Ids period = {3, 1, 4, 1, 5};
  Ids text(12);
  for (size_t i = 0; i < text.size(); ++i) {
    text[i] = period[i % period.size()];
  }
  size_t accepted = 0;
  constexpr size_t kSteps = 20;
  for (size_t step = 0; step < kSteps; ++step) {
    const auto tree = NgramDraft::grow(text, {4, 2, 64});
    std::vector<float> rows;
    for (const int32_t depth : tree.depths) {
      std::vector<float> row(kLetters, 0.0F);
      const size_t at = text.size() + static_cast<size_t>(depth);
      row[static_cast<size_t>(period[at % period.size()])] = 1.0F;
      rows.insert(rows.end(), row.begin(), row.end());
    }
    Sampler sampler;
    const auto verified = must(examples::verify(tree, view(rows), sampler));
    accepted += verified.accepted.size() - 1;
    for (size_t i = 1; i < verified.accepted.size(); ++i) {
      text.push_back(tree.tokens[static_cast<size_t>(verified.accepted[i])]);
    }
    text.push_back(verified.next);
  }
  CHECK(accepted == 4 * kSteps);
}

// ---- On programs ----------------------------------------------------------------------

/// Greedy answers are those of reference decoding, for every draft and shape.
void same_ids() {
  const size_t most = 24;
  const Ids reference = reference_ids("tiny-llama-f32", prompt(), most);
  Target target;
  std::map<std::string, int64_t> fewest;
  for (const char* name : {"ngram", "tiny-llama-f32", "tiny-qwen3-f32"}) {
    const auto proposer = draft(name, target);
    for (int64_t depth = 0; depth <= 6; ++depth) {
      for (const int64_t width : {1, 2, 3, 4, 5, 6, 7, 8, 16}) {
        if (depth == 0 && width > 1) {
          break;
        }
        // Wide trees cost the most, so fewer steps run with them.
        const size_t n = width <= 2 ? most : 10;
        const Ids wanted = slice(reference, 0, n);
        must(target.cache().clear());
        Speculation speculation(target, *proposer, depth, width);
        const auto answer = speculation.answer(prompt(), n);
        CHECK(answer.ids == wanted);
        CHECK_INT(
            *target.cache().length(), prompt().size() + wanted.size() - 1);
        const auto took = speculation.speculator.take_statistics();
        CHECK_INT(took.ids, n - 1);
        if (std::string(name) == "tiny-llama-f32") {
          // With the model itself as the draft, all draft tokens are correct.
          CHECK_INT(
              took.steps, (static_cast<int64_t>(n) - 1 + depth) / (depth + 1));
        }
        if (n == most) {
          auto& least = fewest.try_emplace(name, took.steps).first->second;
          least = std::min(least, took.steps);
        }
      }
    }
  }
  for (const auto& [name, steps] : fewest) {
    std::printf(
        "%s: %zu ids in %lld steps at best\n",
        name.c_str(),
        most - 1,
        static_cast<long long>(steps));
  }
}

/// A draft that records the requested widths, and proposes nothing.
class RecordingDraft : public examples::Draft {
 public:
  explicit RecordingDraft(std::optional<int64_t> pays) : pays_(pays) {}
  Result<TokenTree> propose(
      const std::vector<int64_t>& text,
      const TreeShape& shape,
      Sampler&) override {
    if (shape.depth > 0) {
      widths.insert(shape.width);
    }
    return TokenTree(text.back());
  }
  Result<void> commit(const std::vector<int32_t>&) override {
    return {};
  }
  std::optional<int64_t> width() const override {
    return pays_;
  }
  double seconds(int64_t, int64_t) const override {
    return 0.0;
  }
  std::set<int64_t> widths;

 private:
  std::optional<int64_t> pays_;
};

/// A draft may choose the width, and the user's width overrides it.
void width_that_pays() {
  CHECK_INT(NgramDraft().width().value_or(0), 1);
  Target target;
  const auto widths = [&](std::optional<int64_t> pays,
                          std::optional<int64_t> given) {
    must(target.cache().clear());
    RecordingDraft draft(pays);
    Speculation(target, draft, 3, given).answer(prompt(), 6);
    return draft.widths;
  };
  CHECK(widths(2, std::nullopt) == std::set<int64_t>{2});
  CHECK(widths(2, 5) == std::set<int64_t>{5});
}

/// A full cache ends the answer. After a rewind it goes on with the same ids.
void at_capacity() {
  const Ids wanted = reference_ids("tiny-llama-f32", prompt(), 40);
  for (const char* name : {"ngram", "tiny-llama-f32"}) {
    Target target("tiny-llama-f32", /*capacity=*/40);
    const auto proposer = draft(name, target, /*capacity=*/40);
    Speculation speculation(target, *proposer, 5, 2);
    const auto full = speculation.answer(prompt(), 40);
    CHECK(full.stop == examples::FinishReason::capacity);
    CHECK_INT(full.ids.size(), 40 - prompt().size() + 1);
    CHECK(full.ids == slice(wanted, 0, full.ids.size()));
    CHECK_INT(*target.cache().length(), 40);
    must(speculation.generator.rewind(prompt().size()));
    const auto again = speculation.answer(prompt(), 10);
    CHECK(again.ids == slice(wanted, 0, 10));
    CHECK_INT(again.reused_tokens, prompt().size() - 1);
  }
  // A draft with a smaller cache than the target proposes until its cache is
  // full.
  Target target;
  const auto proposer = draft("tiny-llama-f32", target, /*capacity=*/30);
  CHECK(
      Speculation(target, *proposer, 3, 2).answer(prompt(), 40).ids == wanted);
}

/// An eos token id ends its answer, wherever in a tree it is.
void ends_within_a_tree() {
  const Ids wanted = reference_ids("tiny-llama-f32", prompt(), 24);
  Target target;
  const auto proposer = draft("tiny-llama-f32", target);
  for (size_t end = 0; end < 8; ++end) {
    if (std::find(
            wanted.begin(),
            wanted.begin() + static_cast<long>(end),
            wanted[end]) != wanted.begin() + static_cast<long>(end)) {
      continue;
    }
    must(target.cache().clear());
    target.model.end_with({wanted[end]});
    const auto answer =
        Speculation(target, *proposer, 6, 2).answer(prompt(), 24);
    CHECK(answer.stop == examples::FinishReason::stop);
    CHECK(answer.ids == slice(wanted, 0, end + 1));
    CHECK_INT(*target.cache().length(), prompt().size() + end);
    CHECK_INT(must(target.cache().tree_len()), 0);
  }
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  greedy_verification();
  ngrams();
  repetition();
  same_ids();
  width_that_pays();
  at_capacity();
  ends_within_a_tree();
  return check_report();
}
