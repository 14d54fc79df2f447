#include "examples/speculation/speculator.hpp"

#include <algorithm>
#include <utility>

#include "examples/common/clock.hpp"
#include "examples/common/format.hpp"
#include "examples/common/try.hpp"
#include "examples/speculation/drafts.hpp"
#include "examples/speculation/ngram.hpp"

namespace etkv::examples {

void add_speculation_arguments(
    Arguments& arguments,
    SpeculationOptions& options,
    const std::string& otherwise) {
  arguments.text(
      "--draft",
      "FILE|ngram",
      "proposes tokens: a program (.pte) with the model's\n"
      "vocabulary, or one fed with its hidden states,\n"
      "or the text so far" +
          otherwise,
      &options.draft);
  arguments.integer_or(
      "auto",
      "--depth",
      "levels of draft tokens; auto, the default,\n"
      "compares the cost and the gain of trees",
      0,
      64,
      &options.depth);
  arguments.integer_or(
      "auto",
      "--width",
      "draft tokens per level; auto, the default, is 1 for\n"
      "ngram, and otherwise compares the cost too",
      1,
      64,
      &options.width);
}

Result<std::unique_ptr<Draft>> make_draft(
    const std::string& name,
    const ModelOptions& options,
    const Model& target,
    const Cache& cache) {
  if (name == "ngram") {
    return std::unique_ptr<Draft>(new NgramDraft());
  }
  const Program& program = target.program();
  return open_draft(
      name,
      {program.vocabulary(),
       cache.capacity(),
       options.kv_format,
       program.tap_layers(),
       program.hidden_state_type()});
}

Speculator::Speculator(
    Model& target,
    TreeCache& cache,
    Draft& draft,
    const SpeculationOptions& options,
    Sampler sampler)
    : target_(target),
      cache_(cache),
      draft_(draft),
      tuner_(options.depth, options.width ? options.width : draft.width()),
      sampler_(std::move(sampler)) {}

void Speculator::read(int64_t position) {
  if (const auto& hidden_states = target_.program().hidden_states()) {
    draft_.saw(position, *hidden_states);
  }
}

Result<int64_t> Speculator::first(const LogitsView& logits) {
  return sampler_.choose(logits, logits.last_row());
}

Result<std::vector<int64_t>> Speculator::next(
    const std::vector<int64_t>& text,
    size_t most) {
  TreeShape shape = tuner_.next([this](int64_t depth, int64_t width) {
    return draft_.seconds(depth, width);
  });
  shape.depth = std::min(shape.depth, static_cast<int64_t>(most) - 1);
  ASSIGN_OR_RETURN(const int32_t length, cache_.length());
  shape.most = static_cast<size_t>(std::min(
      cache_.capacity() - length,
      target_.program().params().prefill_chunk_size));
  if (shape.depth > 0) {
    // If the step or the cache lacks room, make the tree narrower rather than
    // shorter.
    const auto each = static_cast<int64_t>(shape.most - 1) / shape.depth;
    shape.width = std::min(shape.width, std::max<int64_t>(each, 1));
  }

  Stopwatch watch;
  ASSIGN_OR_RETURN(const auto tree, draft_.propose(text, shape, sampler_));
  const double draft_seconds = watch.lap();
  const auto base = static_cast<int64_t>(text.size()) - 1;
  ASSIGN_OR_RETURN(auto verified, verify_in_one_forward(tree, base));
  const auto agreed = verified;
  cut_at_end(tree, verified);
  RETURN_IF_ERROR(cache_.commit(verified.accepted));
  // Verification includes the commit, which may move rows of a wide tree.
  const double verify_seconds = watch.lap();
  tuner_.observe(shape, tree, agreed, verify_seconds, draft_seconds);
  // The draft keeps the same chain as the model.
  RETURN_IF_ERROR(draft_.commit(verified.accepted));
  if (const auto& hidden_states = target_.program().hidden_states()) {
    for (size_t i = 0; i < verified.accepted.size(); ++i) {
      draft_.saw(
          base + static_cast<int64_t>(i),
          hidden_states->only(verified.accepted[i]));
    }
  }

  std::vector<int64_t> ids;
  for (const int32_t node : verified.accepted) {
    if (node != 0) {
      ids.push_back(tree.tokens[static_cast<size_t>(node)]);
    }
  }
  ++statistics_.steps;
  statistics_.accepted += static_cast<int64_t>(ids.size());
  ids.push_back(verified.next);
  statistics_.ids += static_cast<int64_t>(ids.size());
  statistics_.candidates += static_cast<int64_t>(tree.size()) - 1;
  statistics_.draft_seconds += draft_seconds;
  statistics_.seconds += draft_seconds + verify_seconds + watch.lap();
  return ids;
}

Result<VerificationResult> Speculator::verify_in_one_forward(
    const TokenTree& tree,
    int64_t base) {
  RETURN_IF_ERROR(cache_.propose(tree.parents));
  const Program& program = target_.program();
  // A draft that needs hidden states needs the states of every token.
  const bool on_device = sampler_.greedy() && !program.hidden_state_type() &&
                         program.params().backend_id == kMLXBackend;
  auto verified =
      on_device ? verify_on_device(tree, base) : verify_on_host(tree, base);
  if (!verified.ok()) {
    // Remove the tree.
    RETURN_IF_ERROR(cache_.commit({}));
  }
  return verified;
}

Result<VerificationResult> Speculator::verify_on_host(
    const TokenTree& tree,
    int64_t base) {
  const auto positions = tree.positions(base);
  ASSIGN_OR_RETURN(
      const auto logits,
      target_.program().step(
          tree.tokens.data(), positions.data(), tree.size()));
  return verify(tree, logits, sampler_);
}

/// Verifies a tree on the device, without a copy of the logits.
Result<VerificationResult> Speculator::verify_on_device(
    const TokenTree& tree,
    int64_t base) {
  const auto positions = tree.positions(base);
  ASSIGN_OR_RETURN(
      const auto chosen,
      choose(cache_, tree.tokens, {positions.begin(), positions.end()}));
  return verify(tree, chosen);
}

/// Ends the accepted chain at an eos token id. Such an id ends the answer and
/// does not run.
void Speculator::cut_at_end(const TokenTree& tree, VerificationResult& verified)
    const {
  auto& accepted = verified.accepted;
  for (size_t i = 1; i < accepted.size(); ++i) {
    const int64_t token = tree.tokens[static_cast<size_t>(accepted[i])];
    if (target_.ends(token)) {
      accepted.resize(i);
      verified.next = token;
      return;
    }
  }
}

Speculator::Statistics Speculator::take_statistics() {
  return std::exchange(statistics_, {});
}

std::string describe(const Speculator::Statistics& statistics) {
  const auto steps =
      static_cast<double>(std::max<int64_t>(statistics.steps, 1));
  const auto ids = static_cast<double>(std::max<int64_t>(statistics.ids, 1));
  const auto drafts =
      statistics.candidates == 0
          ? std::string("the draft proposed no tokens")
          : fixed(static_cast<double>(statistics.accepted) / steps, 2) +
                " of " +
                fixed(static_cast<double>(statistics.candidates) / steps, 1) +
                " draft tokens accepted";
  return counted(statistics.ids, "token") + " after the first in " +
         counted(statistics.steps, "step") + ": " +
         fixed(static_cast<double>(statistics.ids) / steps, 2) + " a step, " +
         drafts + " · " +
         fixed(static_cast<double>(statistics.steps) / ids, 2) +
         " forwards a token · " + rate(statistics.ids, statistics.seconds) +
         ", " +
         fixed(
             statistics.seconds > 0.0
                 ? 100.0 * statistics.draft_seconds / statistics.seconds
                 : 0.0,
             0) +
         "% of it for drafts";
}

} // namespace etkv::examples
