// A smaller model as the draft. Its limits (capacity, rows of logits, windows)
// affect only the draft, and end no answer.

#include <csignal>
#include <filesystem>
#include <fstream>

#include "examples/common/interrupt.hpp"
#include "speculative.hpp"

namespace etkv::tests {
namespace {

/// Returns the proposal of a new draft.
TokenTree
fresh(const std::string& name, const Ids& text, const TreeShape& shape) {
  Target target;
  Sampler greedy;
  return must(draft(name, target)->propose(text, shape, greedy));
}

/// Answers every prompt greedily, and compares the answers with reference
/// decoding.
void answers_as_reference(
    const std::string& name,
    const std::vector<Ids>& prompts,
    size_t n,
    int64_t depth,
    int64_t width,
    int32_t capacity = 200) {
  Target target("tiny-llama-f32", capacity);
  const auto proposer = draft(name, target, capacity);
  Speculation speculation(target, *proposer, depth, width);
  const Change change = [&](CacheConfig& config) {
    config.capacity = capacity;
  };
  for (const Ids& prompt : prompts) {
    CHECK(
        speculation.answer(prompt, n).ids ==
        reference_ids("tiny-llama-f32", prompt, n, change));
  }
}

/// A tuner needs the draft's costs before the first tree.
void costs_before_the_first_tree() {
  Target target;
  const auto proposer = draft("tiny-llama-f32", target);
  const double one = proposer->seconds(1, 1);
  CHECK(one > 0.0);
  CHECK(proposer->seconds(0, 1) == 0.0);
  CHECK(proposer->seconds(3, 1) > 2.0 * one);
}

/// A text that differs early needs rows that layers with windows have dropped,
/// so the whole text is read again.
void windows() {
  const TreeShape shape = {3, 2, 32};
  constexpr int32_t kCapacity = 400;
  const Ids before = text(240, 5);
  const Ids other = joined(slice(before, 0, 10), text(30, 6));
  {
    On<Cache> on(
        [](CacheConfig& config) { config.capacity = kCapacity; },
        "tiny-mistral-window-f32");
    on.model.read(before, kMaxTokens);
    CHECK(must(on.cache().rewindable_to()) > 10);
  }

  Target target("tiny-llama-f32", kCapacity);
  const auto proposer = draft("tiny-mistral-window-f32", target, kCapacity);
  Sampler greedy;
  must(proposer->propose(before, shape, greedy));
  const auto tree = must(proposer->propose(other, shape, greedy));
  CHECK(same(tree, fresh("tiny-mistral-window-f32", other, shape)));
  // A text that continues the last one goes on from the cache.
  const auto again =
      must(proposer->propose(slice(other, 0, 35), shape, greedy));
  CHECK(same(
      again, fresh("tiny-mistral-window-f32", slice(other, 0, 35), shape)));

  answers_as_reference(
      "tiny-mistral-window-f32", {before, other, before}, 40, 3, 2, kCapacity);
}

/// No level has more nodes than the draft accepts tokens in a step.
void narrower_steps() {
  Target target;
  Sampler greedy;
  const auto tree = must(draft("tiny-llama-f32-chunk4", target)
                             ->propose(prompt(), {3, 8, 32}, greedy));
  CHECK_INT(tree.size(), 1 + 3 * 4);
  for (int32_t depth = 1; depth <= 3; ++depth) {
    CHECK_INT(std::count(tree.depths.begin(), tree.depths.end(), depth), 4);
  }
  answers_as_reference("tiny-llama-f32-chunk4", {prompt()}, 24, 3, 8);
  answers_as_reference("tiny-llama-f32", {prompt()}, 24, 2, 12);
}

/// A draft that returns one row of logits proposes chains. A tree is an error
/// that names the draft.
void one_row_of_logits() {
  answers_as_reference("tiny-llama-f32-last", {prompt()}, 24, 3, 1);
  Target target;
  Sampler greedy;
  CHECK_REFUSED(
      draft("tiny-llama-f32-last", target)
          ->propose(prompt(), {3, 2, 32}, greedy),
      ETKV_ERROR_UNSUPPORTED,
      "the draft: the program returns logits of 1 of 2 tokens");
}

/// Ctrl-C between two steps of the draft. The next text goes on after the
/// tokens that were read before.
void interrupts() {
  const TreeShape shape = {3, 2, 32};
  const Ids whole = text(140, 5);
  Target target;
  const auto proposer = draft("tiny-llama-f32", target);
  Sampler greedy;
  must(proposer->propose(slice(whole, 0, 40), shape, greedy));
  examples::arm_interrupt();
  std::raise(SIGINT);
  // The rest of the text, two steps, is not read.
  CHECK_INT(must(proposer->propose(whole, shape, greedy)).size(), 1);
  examples::arm_interrupt();
  CHECK(same(
      must(proposer->propose(whole, shape, greedy)),
      fresh("tiny-llama-f32", whole, shape)));
}

/// A commit of nodes that are not a chain is refused, and the draft stays as it
/// was. The next text goes on from the cache.
void commits_that_cannot_be() {
  const TreeShape shape = {3, 2, 32};
  Target target;
  const auto proposer = draft("tiny-llama-f32", target);
  Sampler greedy;
  const auto tree = must(proposer->propose(prompt(), shape, greedy));
  REQUIRE(tree.parents[1] == 0 && tree.parents[2] == 0);
  const auto refused = proposer->commit({0, 1, 2});
  CHECK_REFUSED(refused, ETKV_ERROR_INVALID_ARGUMENT, "the draft: ");
  const Ids longer = joined(prompt(), {tree.tokens[1], tree.tokens[2], 7});
  CHECK(same(
      must(proposer->propose(longer, shape, greedy)),
      fresh("tiny-llama-f32", longer, shape)));
}

/// Writes the program with its context length under another name.
void untold_context(const std::string& path) {
  std::string bytes = contents(program_path("tiny-llama-f32"));
  const std::string name = "get_max_ctx_len";
  size_t found = 0;
  for (size_t at = bytes.find(name); at != std::string::npos;
       at = bytes.find(name, at + 1)) {
    bytes[at] = 'x';
    ++found;
  }
  REQUIRE(found > 0);
  std::ofstream(path, std::ios::binary) << bytes;
}

/// A draft without a context length gets the context length of its target.
void without_context() {
  const auto path = std::filesystem::temp_directory_path() /
                    ("etkv-untold-" + std::to_string(std::rand()) + ".pte");
  untold_context(path.string());
  auto opened = examples::open_draft(path.string(), {320, 60, {}});
  std::filesystem::remove(path);
  const auto proposer = must(std::move(opened));
  Sampler greedy;
  const TreeShape shape = {2, 2, 32};
  CHECK(same(
      must(proposer->propose(prompt(), shape, greedy)),
      fresh("tiny-llama-f32", prompt(), shape)));
  CHECK_INT(must(proposer->propose(text(61), shape, greedy)).size(), 1);
}

void refusals() {
  CHECK_REFUSED(
      examples::open_draft(program_path("tiny-llama-f32"), {1000, 64, {}}),
      ETKV_ERROR_PROGRAM,
      "a vocabulary of 320 ids, and the model one of 1000");
  CHECK_REFUSED(
      examples::open_draft("nowhere.pte", {320, 64, {}}),
      ETKV_ERROR_INVALID_ARGUMENT,
      "the draft: there is no program at nowhere.pte");
  // A text with an id outside the draft's vocabulary.
  Target target;
  Sampler greedy;
  CHECK_REFUSED(
      draft("tiny-llama-f32", target)->propose({1, 320}, {2, 2, 32}, greedy),
      ETKV_ERROR_INVALID_ARGUMENT,
      "the draft: token 320 is outside");
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  costs_before_the_first_tree();
  windows();
  narrower_steps();
  one_row_of_logits();
  interrupts();
  commits_that_cannot_be();
  without_context();
  refusals();
  return check_report();
}
