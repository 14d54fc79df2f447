// etkv_speculative: a draft proposes a tree of tokens, and the model verifies
// it in one forward. The answer is the same as without a draft.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "etkv/executorch.hpp"
#include "examples/common/console.hpp"
#include "examples/common/format.hpp"
#include "examples/common/interrupt.hpp"
#include "examples/common/reference_decoding.hpp"
#include "examples/common/runner.hpp"
#include "examples/common/try.hpp"
#include "examples/common/warm_up.hpp"
#include "examples/speculation/speculator.hpp"

namespace etkv::examples {
namespace {

const std::vector<std::string>& built_in() {
  static const std::vector<std::string> all = {
      "What is the capital of France?",
      "Copy this: 1, 2, 3, 4, 5, 6, 7, 8",
      "List the numbers from one to twenty.",
  };
  return all;
}

struct Sampling {
  double temperature = 0.0;
  std::optional<int64_t> seed;
};

Result<void> run(
    const RunnerOptions& options,
    const SpeculationOptions& speculation,
    const Sampling& sampling) {
  ASSIGN_OR_RETURN(auto model, Model::open(options.model));
  ASSIGN_OR_RETURN(
      auto session, make_tree_session(model.backend_id(), model.config()));
  TreeCache& cache = session.cache();
  RETURN_IF_ERROR(load_warm(model.program(), session, Logits::proposed));
  ASSIGN_OR_RETURN(
      const auto draft,
      make_draft(
          speculation.draft.value_or("ngram"), options.model, model, cache));
  Speculator speculator(
      model,
      cache,
      *draft,
      speculation,
      Sampler(
          sampling.temperature,
          static_cast<uint64_t>(sampling.seed.value_or(0))));
  Generator generator(
      model.program(), cache, model.eos_token_ids(), &speculator);

  std::vector<Decoding> answers;
  for (const auto& prompt : options.prompts_or(built_in())) {
    Decoding one{prompt, {}, options.max_tokens};
    ASSIGN_OR_RETURN(one.prompt, model.encode(prompt));
    ASSIGN_OR_RETURN(
        auto answer,
        generator.answer(one.prompt, options.max_tokens, Listener()));
    one.ids = std::move(answer.ids);
    one.stop = answer.stop;
    RETURN_IF_ERROR(show(model, options, one.title, one.ids));
    if (interrupted()) {
      return {};
    }
    say_stop(answer.stop, cache.capacity());
    say(describe(speculator.take_statistics()));
    answers.push_back(std::move(one));
  }
  return options.check ? check_answers(model, answers) : Result<void>();
}

} // namespace
} // namespace etkv::examples

int main(int argc, char** argv) {
  using namespace etkv::examples;

  Runner runner(
      "etkv_speculative",
      "Answers with draft tokens: a draft proposes a tree of ids, the model\n"
      "verifies all of them in one forward, and the chain that it accepts is\n"
      "kept. The answers are the same as without a draft.\n");
  SpeculationOptions speculation;
  Sampling sampling;
  add_speculation_arguments(
      runner.arguments(), speculation, " (ngram, the default)");
  runner.arguments().number(
      "--temperature",
      "T",
      "draw ids at random, with the logits divided by this;\n"
      "0, the default, chooses the greatest",
      0.0,
      100.0,
      &sampling.temperature);
  runner.arguments().integer(
      "--seed",
      "N",
      "seed of the random numbers (0)",
      0,
      INT64_MAX,
      &sampling.seed);
  runner.require([&]() -> etkv::Result<void> {
    if (sampling.temperature > 0.0 && runner.options().check) {
      return etkv::Error(
          ETKV_ERROR_INVALID_ARGUMENT,
          "--check does not go with --temperature: it compares greedy answers");
    }
    return {};
  });
  return runner.main(argc, argv, [&](const RunnerOptions& options) {
    return run(options, speculation, sampling);
  });
}
