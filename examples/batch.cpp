// etkv_batch: decodes several prompts together in one sequence cache, with one
// forward per step. Answers end at different times. The cells of an ended
// answer are free for the others.

#include <algorithm>
#include <string>
#include <vector>

#include "etkv/executorch.hpp"
#include "examples/common/batch.hpp"
#include "examples/common/clock.hpp"
#include "examples/common/console.hpp"
#include "examples/common/format.hpp"
#include "examples/common/interrupt.hpp"
#include "examples/common/reference_decoding.hpp"
#include "examples/common/runner.hpp"
#include "examples/common/try.hpp"
#include "examples/common/warm_up.hpp"

namespace etkv::examples {
namespace {

/// The numbers of tokens and the seconds of the steps.
struct Statistics {
  int64_t prefill_tokens = 0;
  double prefill_seconds = 0.0;
  int64_t decode_tokens = 0;
  int64_t decode_steps = 0;
  double decode_seconds = 0.0;
};

class Together {
 public:
  Together(Model& model, SeqCache& cache, const RunnerOptions& options)
      : model_(model), cache_(cache), options_(options) {}

  /// Returns how many prompts, starting at index `first`, fit in the empty
  /// cache together with answers of the maximum length. Returns at least 1.
  size_t fitting(const std::vector<Decoding>& all, size_t first) const {
    // A step has one token of each answer.
    const auto most = static_cast<size_t>(
        std::min(model_.program().params().prefill_chunk_size, kSequences));
    int64_t needed = 0;
    size_t last = first;
    for (; last < all.size() && last - first < most; ++last) {
      needed += static_cast<int64_t>(all[last].prompt.size()) +
                all[last].max_tokens - 1;
      if (last > first && needed > cache_.capacity()) {
        break;
      }
    }
    return last - first;
  }

  /// Answers prompts in the empty cache, and leaves it empty.
  Result<void> answer(std::vector<Decoding>& all) {
    for (auto& one : all) {
      one.sequence = static_cast<int32_t>(&one - all.data());
    }
    if (model_.backend_id() == kMLXBackend) {
      return answer_on_device(all);
    }
    return answer_by_steps(all);
  }

  Result<void> report() const {
    ASSIGN_OR_RETURN(const Memory memory, cache_.memory());
    say("prefill " + counted(took_.prefill_tokens, "token") + " (" +
        rate(took_.prefill_tokens, took_.prefill_seconds) + ") · decode " +
        counted(took_.decode_tokens, "token") + " in " +
        counted(took_.decode_steps, "step") + " (" +
        rate(took_.decode_tokens, took_.decode_seconds) + ") · cache " +
        mebibytes(memory.allocated) + " of " + mebibytes(memory.at_capacity) +
        " (" + model_.format() + ")");
    return {};
  }

 private:
  /// Does the same as answer(), but the device chooses the tokens. Each step
  /// starts before the host reads the tokens of the previous step.
  Result<void> answer_on_device(std::vector<Decoding>& all) {
    Stopwatch watch;
    std::vector<Prompt> prompts;
    for (const auto& one : all) {
      RETURN_IF_ERROR(
          model_.program().check_ids(one.prompt.data(), one.prompt.size()));
      prompts.push_back({one.prompt, one.sequence});
    }
    GenerationOptions options;
    options.max_tokens = static_cast<int32_t>(options_.max_tokens);
    options.stop = model_.eos_token_ids();
    ASSIGN_OR_RETURN(
        auto generation, Generation::make(cache_, prompts, options));
    for (size_t waiting = 1; waiting > 0;) {
      if (interrupted()) {
        return {};
      }
      ASSIGN_OR_RETURN(waiting, generation.read_prompts());
    }
    for (const auto& one : all) {
      took_.prefill_tokens += static_cast<int64_t>(one.prompt.size());
    }
    took_.prefill_seconds += watch.lap();
    while (!interrupted()) {
      ASSIGN_OR_RETURN(const auto next, generation.next());
      if (next.empty()) {
        break;
      }
      if (!all.front().ids.empty()) {
        took_.decode_tokens += static_cast<int64_t>(next.size());
        ++took_.decode_steps;
      }
      for (const auto& [prompt, id, end] : next) {
        all[prompt].ids.push_back(id);
        all[prompt].stop = stop_of(end);
      }
      RETURN_IF_ERROR(retire(all));
    }
    took_.decode_seconds += watch.lap();
    return {};
  }

  Result<void> answer_by_steps(std::vector<Decoding>& all) {
    Stopwatch watch;
    for (auto& one : all) {
      ASSIGN_OR_RETURN(
          const bool begun, begin(model_, cache_, one, /*held=*/0));
      if (!begun) {
        return {};
      }
      took_.prefill_tokens += static_cast<int64_t>(one.prompt.size());
    }
    took_.prefill_seconds += watch.lap();
    // Run one token of each sequence in one forward.
    RETURN_IF_ERROR(retire(all));
    for (auto active = unfinished(all); !active.empty() && !interrupted();
         active = unfinished(all)) {
      ASSIGN_OR_RETURN(
          const bool fits,
          cache_.can_extend(static_cast<int32_t>(active.size())));
      if (fits) {
        RETURN_IF_ERROR(step_together(model_, cache_, active));
        took_.decode_tokens += static_cast<int64_t>(active.size());
        ++took_.decode_steps;
      } else {
        active.back()->stop = FinishReason::capacity;
      }
      RETURN_IF_ERROR(retire(all));
    }
    took_.decode_seconds += watch.lap();
    return {};
  }

  /// Shows answers that have just ended, and frees their cells for other
  /// sequences.
  Result<void> retire(std::vector<Decoding>& all) {
    for (auto& one : all) {
      ASSIGN_OR_RETURN(const auto held, cache_.seq_len(one.sequence));
      if (one.stop && held > 0) {
        RETURN_IF_ERROR(show(model_, options_, one.title, one.ids));
        say_stop(*one.stop, cache_.capacity());
        RETURN_IF_ERROR(cache_.seq_rm(one.sequence));
      }
    }
    return {};
  }

  Model& model_;
  SeqCache& cache_;
  const RunnerOptions& options_;
  Statistics took_;
};

Result<void> run(const RunnerOptions& options) {
  ASSIGN_OR_RETURN(auto model, Model::open(options.model));
  ASSIGN_OR_RETURN(
      auto session, make_seq_session(model.backend_id(), model.config()));
  RETURN_IF_ERROR(load_warm(model.program(), session, Logits::all));

  Refusals refusals;
  std::vector<Decoding> all;
  for (const auto& prompt : options.prompts_or(questions())) {
    ASSIGN_OR_RETURN(auto ids, model.encode(prompt));
    if (refusals.admit(prompt, ids.size(), session.cache())) {
      all.push_back({prompt, std::move(ids), options.max_tokens});
    }
  }
  Together together(model, session.cache(), options);
  std::vector<Decoding> answers;
  while (answers.size() < all.size() && !interrupted()) {
    const auto first =
        all.begin() + static_cast<std::ptrdiff_t>(answers.size());
    const size_t n = together.fitting(all, answers.size());
    std::vector<Decoding> some(first, first + static_cast<std::ptrdiff_t>(n));
    RETURN_IF_ERROR(together.answer(some));
    answers.insert(answers.end(), some.begin(), some.end());
  }
  RETURN_IF_ERROR(together.report());
  if (interrupted()) {
    return {};
  }
  if (options.check) {
    RETURN_IF_ERROR(check_answers(model, answers));
  }
  return refusals.outcome();
}

} // namespace
} // namespace etkv::examples

int main(int argc, char** argv) {
  etkv::examples::Runner runner(
      "etkv_batch",
      "Answers several prompts together: one sequence each in one cache, one\n"
      "forward of the model a step for all of them.\n");
  return runner.main(argc, argv, etkv::examples::run);
}
