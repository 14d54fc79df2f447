// etkv_batch: several prompts decoded together in one sequence cache, one forward
// a step. Answers end at different times; what one held is free for the others.

#include <algorithm>
#include <string>
#include <vector>

#include "etkv/executorch.hpp"
#include "examples/common/batch.hpp"
#include "examples/common/clock.hpp"
#include "examples/common/console.hpp"
#include "examples/common/format.hpp"
#include "examples/common/interrupt.hpp"
#include "examples/common/plain.hpp"
#include "examples/common/runner.hpp"
#include "examples/common/try.hpp"

namespace etkv::examples {
namespace {

/// What the steps took.
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

  /// How many of `waiting`, at least one, fit in the empty cache together, with
  /// the longest answers that they may get.
  size_t fitting(const Decoding* waiting, size_t n) const {
    const auto most =
        static_cast<size_t>(model_.program().params().prefill_chunk_size);
    int64_t needed = 0;
    for (size_t i = 0; i < std::min(n, most); ++i) {
      needed += static_cast<int64_t>(waiting[i].prompt.size()) +
                options_.max_new_tokens - 1;
      if (i > 0 && needed > cache_.capacity()) {
        return i;
      }
    }
    return std::min(n, most);
  }

  /// Answers prompts in the empty cache, and leaves it empty.
  Result<void> answer(Decoding* all, size_t n) {
    Stopwatch watch;
    std::vector<Decoding*> active;
    for (size_t i = 0; i < n; ++i) {
      active.push_back(&all[i]);
      all[i].sequence = static_cast<int32_t>(i);
      ASSIGN_OR_RETURN(const bool read, read_prompt(all[i]));
      if (!read) {
        return {};
      }
    }
    took_.prefill_seconds += watch.lap();
    for (;;) {
      RETURN_IF_ERROR(retire(active));
      if (active.empty() || interrupted()) {
        break;
      }
      if (!cache_.can_extend(static_cast<int32_t>(active.size()))) {
        active.back()->stop = Stop::capacity;
        continue;
      }
      // One token of each sequence, one forward for all of them.
      Batch batch;
      for (const Decoding* one : active) {
        batch.add(one->ids.back(), one->position(), one->sequence);
      }
      ASSIGN_OR_RETURN(const auto logits, batch.step(model_.program(), cache_));
      for (size_t row = 0; row < active.size(); ++row) {
        RETURN_IF_ERROR(
            active[row]->take(
                model_,
                logits,
                static_cast<int64_t>(row),
                options_.max_new_tokens));
      }
      took_.decode_tokens += static_cast<int64_t>(active.size());
      ++took_.decode_steps;
    }
    took_.decode_seconds += watch.lap();
    return {};
  }

  void report() const {
    const Memory memory = cache_.memory();
    say("prefill " + counted(took_.prefill_tokens, "token") + " (" +
        rate(took_.prefill_tokens, took_.prefill_seconds) + ") · decode " +
        counted(took_.decode_tokens, "token") + " in " +
        counted(took_.decode_steps, "step") + " (" +
        rate(took_.decode_tokens, took_.decode_seconds) + ") · cache " +
        mebibytes(memory.allocated) + " of " + mebibytes(memory.at_capacity) +
        " (" + model_.format() + ")");
  }

 private:
  /// Puts a prompt into its sequence; false after Ctrl-C.
  Result<bool> read_prompt(Decoding& one) {
    RETURN_IF_ERROR(check_length(one.prompt.size(), cache_));
    ASSIGN_OR_RETURN(
        const auto logits,
        prefill(
            model_.program(),
            cache_,
            one.sequence,
            /*position=*/0,
            one.prompt.data(),
            one.prompt.size()));
    if (!logits) {
      return false;
    }
    took_.prefill_tokens += static_cast<int64_t>(one.prompt.size());
    RETURN_IF_ERROR(
        one.take(model_, *logits, logits->last_row(), options_.max_new_tokens));
    return true;
  }

  /// Shows the answers that are done; what they held is free for the others.
  Result<void> retire(std::vector<Decoding*>& active) {
    for (const Decoding* one : active) {
      if (one->stop) {
        RETURN_IF_ERROR(show(model_, options_, one->title, one->ids));
        say_stop(*one->stop, cache_);
        RETURN_IF_ERROR(cache_.seq_rm(one->sequence));
      }
    }
    const auto done = [](const Decoding* one) { return one->stop.has_value(); };
    active.erase(
        std::remove_if(active.begin(), active.end(), done), active.end());
    return {};
  }

  Model& model_;
  SeqCache& cache_;
  const RunnerOptions& options_;
  Statistics took_;
};

Result<void> run(const RunnerOptions& options) {
  ASSIGN_OR_RETURN(auto model, Model::open(options.model));
  ASSIGN_OR_RETURN(auto session, make_seq_session(kMLXBackend, model.config()));
  RETURN_IF_ERROR(model.program().load(session.key(), Logits::all));

  std::vector<Decoding> all;
  for (const auto& prompt : options.prompts_or(questions())) {
    ASSIGN_OR_RETURN(auto ids, model.encode(prompt));
    all.push_back({prompt, std::move(ids)});
  }
  Together together(model, session.cache(), options);
  for (size_t done = 0; done < all.size() && !interrupted();) {
    const size_t n = together.fitting(all.data() + done, all.size() - done);
    RETURN_IF_ERROR(together.answer(all.data() + done, n));
    done += n;
  }
  together.report();
  return options.check ? check_answers(model, all, options.max_new_tokens)
                       : Result<void>();
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
