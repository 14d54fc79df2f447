// etkv_admission: answers requests that arrive while others are running.
// Prompts are read in chunks, in the same forwards as the tokens of running
// answers. An answered request stays in the cache until its cells are needed.

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "etkv/executorch.hpp"
#include "examples/common/batch.hpp"
#include "examples/common/clock.hpp"
#include "examples/common/console.hpp"
#include "examples/common/format.hpp"
#include "examples/common/interrupt.hpp"
#include "examples/common/reference_decoding.hpp"
#include "examples/common/runner.hpp"
#include "examples/common/scheduler.hpp"
#include "examples/common/try.hpp"
#include "examples/common/warm_up.hpp"

namespace etkv::examples {
namespace {

struct AdmissionOptions {
  std::optional<int64_t> every;
  std::optional<int64_t> step;
};

class Server {
 public:
  Server(Model& model, SeqCache& cache, size_t step_tokens)
      : model_(model),
        cache_(cache),
        scheduler_(
            step_tokens,
            kSequences,
            {[this](size_t n) {
               return cache_.can_extend(static_cast<int32_t>(n));
             },
             [this](int32_t sequence) { return cache_.seq_rm(sequence); }}) {}

  /// Adds a request. Refuses a request that can never fit.
  void submit(Decoding one) {
    if (refusals_.admit(one.title, one.prompt.size(), cache_)) {
      scheduler_.submit(one.prompt.size());
      requests_.push_back(std::move(one));
    }
  }

  /// Runs one forward for all requests. Returns the requests that are finished.
  Result<std::vector<size_t>> step() {
    Scheduler::Events events;
    ASSIGN_OR_RETURN(const auto shares, scheduler_.next(events));
    tell(events);
    std::vector<size_t> done;
    if (events.stuck) {
      requests_[*events.stuck].stop = FinishReason::capacity;
      done.push_back(*events.stuck);
    }
    if (shares.empty()) {
      return done;
    }
    Batch batch;
    for (const auto& [number, n] : shares) {
      const auto text = text_of(number);
      const auto& request = scheduler_.request(number);
      batch.add(
          text.data() + request.held,
          n,
          static_cast<int64_t>(request.held),
          request.sequence);
    }
    ASSIGN_OR_RETURN(const auto logits, batch.step(model_.program(), cache_));
    RETURN_IF_ERROR(check_rows(logits, batch.size()));
    scheduler_.done(shares);
    ++steps_;
    tokens_ += batch.size();
    mixed_ += shares.back().n > 1 && shares.front().n == 1 ? 1 : 0;

    int64_t row = -1;
    for (const auto& [number, n] : shares) {
      row += static_cast<int64_t>(n);
      const auto& request = scheduler_.request(number);
      if (request.held < request.length) {
        continue; // The prompt has not been read completely.
      }
      RETURN_IF_ERROR(requests_[number].take(model_, logits, row));
      scheduler_.grow(number);
      if (requests_[number].stop) {
        scheduler_.finish(number);
        done.push_back(number);
      }
    }
    return done;
  }

  bool busy() const {
    return scheduler_.busy();
  }
  size_t steps() const {
    return steps_;
  }
  const std::vector<Decoding>& requests() const {
    return requests_;
  }
  const Refusals& refusals() const {
    return refusals_;
  }

  Result<void> report(double seconds) const {
    ASSIGN_OR_RETURN(const Memory memory, cache_.memory());
    say(counted(static_cast<int64_t>(tokens_), "token") + " in " +
        counted(static_cast<int64_t>(steps_), "step") + ", " +
        std::to_string(mixed_) + " of them with prompts and answers (" +
        rate(static_cast<int64_t>(tokens_), seconds) + ") · cache " +
        mebibytes(memory.allocated) + " of " + mebibytes(memory.at_capacity) +
        " (" + model_.format() + ")");
    return {};
  }

 private:
  /// A request: its prompt, and its answer so far.
  std::vector<int64_t> text_of(size_t number) const {
    auto text = requests_[number].prompt;
    const auto& ids = requests_[number].ids;
    text.insert(text.end(), ids.begin(), ids.end());
    return text;
  }

  void tell(const Scheduler::Events& events) const {
    const auto name = [this](size_t number) {
      return "\"" + requests_[number].title + "\"";
    };
    const std::string at = "step " + std::to_string(steps_) + ": ";
    for (const size_t number : events.evicted) {
      say(at + "evicted " + name(number));
    }
    for (const size_t number : events.preempted) {
      say(at + "preempted " + name(number));
    }
    for (const size_t number : events.admitted) {
      say(at + "admitted " + name(number) + ", " +
          counted(
              static_cast<int64_t>(scheduler_.request(number).length),
              "token"));
    }
  }

  Model& model_;
  SeqCache& cache_;
  Scheduler scheduler_;
  Refusals refusals_;
  std::vector<Decoding> requests_;
  size_t steps_ = 0;
  size_t tokens_ = 0;
  size_t mixed_ = 0;
};

Result<void> run(const RunnerOptions& options, const AdmissionOptions& more) {
  ASSIGN_OR_RETURN(auto model, Model::open(options.model));
  ASSIGN_OR_RETURN(
      auto session, make_seq_session(model.backend_id(), model.config()));
  RETURN_IF_ERROR(load_warm(model.program(), session, Logits::all));
  std::vector<Decoding> coming;
  for (const auto& prompt : options.prompts_or(questions())) {
    ASSIGN_OR_RETURN(auto ids, model.encode(prompt));
    coming.push_back({prompt, std::move(ids), options.max_tokens});
  }

  const auto every = static_cast<size_t>(more.every.value_or(4));
  const size_t most = std::min<size_t>(
      static_cast<size_t>(more.step.value_or(32)),
      static_cast<size_t>(model.program().params().prefill_chunk_size));
  Server server(model, session.cache(), most);
  Stopwatch watch;
  size_t next = 0;
  while ((next < coming.size() || server.busy()) && !interrupted()) {
    // A request arrives every few steps, or as soon as there is nothing to do.
    if (next < coming.size() &&
        (!server.busy() || server.steps() >= next * every)) {
      server.submit(coming[next++]);
    }
    ASSIGN_OR_RETURN(const auto done, server.step());
    for (const size_t number : done) {
      const auto& one = server.requests()[number];
      RETURN_IF_ERROR(show(model, options, one.title, one.ids));
      say_stop(*one.stop, session.cache().capacity());
    }
  }
  RETURN_IF_ERROR(server.report(watch.lap()));
  if (interrupted()) {
    return {};
  }
  if (options.check) {
    RETURN_IF_ERROR(check_answers(model, server.requests()));
  }
  return server.refusals().outcome();
}

} // namespace
} // namespace etkv::examples

int main(int argc, char** argv) {
  using namespace etkv::examples;

  Runner runner(
      "etkv_admission",
      "Answers requests that arrive one after the other, while others are "
      "answered:\n"
      "prompts are read in chunks in the same forwards as the tokens of "
      "answers.\n"
      "Answers stay in the cache until a request needs their cells.\n");
  AdmissionOptions more;
  runner.arguments().integer(
      "--every",
      "N",
      "steps from one request to the next (4)",
      0,
      1 << 20,
      &more.every);
  runner.arguments().integer(
      "--step-tokens",
      "N",
      "maximum tokens of a step (32)",
      1,
      1 << 20,
      &more.step);
  return runner.main(argc, argv, [&](const RunnerOptions& options) {
    return run(options, more);
  });
}
