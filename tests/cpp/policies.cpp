// The scheduler of the example runners, without a model: it chooses the
// requests of each step.

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "examples/common/scheduler.hpp"
#include "fixture.hpp"

namespace etkv::tests {
namespace {

using examples::Scheduler;

/// A simulated cache that only counts positions, and requests with answers of
/// fixed lengths.
struct Simulation {
  Simulation(size_t capacity, size_t step_tokens, int32_t sequences)
      : capacity(capacity),
        step_tokens(step_tokens),
        sequences(sequences),
        scheduler(
            step_tokens,
            sequences,
            {[this](size_t n) { return used() + n <= this->capacity; },
             [this](int32_t sequence) {
               held.erase(sequence);
               return Result<void>();
             }}) {}

  size_t used() const {
    size_t sum = 0;
    for (const auto& [_, n] : held) {
      sum += n;
    }
    return sum;
  }

  void submit(size_t prompt, size_t answer) {
    scheduler.submit(prompt);
    prompts.push_back(prompt);
    answers.push_back(answer);
    made.push_back(0);
  }

  void step() {
    // The requests that were idle before the step, longest idle first.
    auto idle_before = idle;
    Scheduler::Events events;
    const auto shares = must(scheduler.next(events));
    for (const size_t number : events.evicted) {
      REQUIRE(!idle_before.empty());
      CHECK_INT(number, idle_before.front());
      idle_before.erase(idle_before.begin());
      CHECK(scheduler.request(number).state == Scheduler::State::gone);
    }
    idle = idle_before;
    for (const size_t number : events.preempted) {
      CHECK(idle.empty());
      CHECK_INT(number, active.back());
      active.pop_back();
      ++n_preempted;
    }
    if (events.stuck) {
      CHECK_INT(active.size(), 1);
      CHECK(idle.empty());
      // Only this request is in the cache, and its next token does not fit.
      CHECK_INT(used(), scheduler.request(*events.stuck).held);
      CHECK_INT(used(), capacity);
      stuck.insert(*events.stuck);
      active.clear();
      idle.push_back(*events.stuck);
    }
    active.insert(active.end(), events.admitted.begin(), events.admitted.end());
    n_evicted += events.evicted.size();

    // Answers come first, with one token each. All answers are in the step,
    // unless the step is full.
    size_t total = 0;
    std::set<size_t> answering;
    for (const size_t number : active) {
      const auto& request = scheduler.request(number);
      if (request.length - request.held == 1) {
        answering.insert(number);
      }
    }
    for (size_t i = 0; i < shares.size(); ++i) {
      const auto& request = scheduler.request(shares[i].request);
      CHECK(request.state == Scheduler::State::active);
      CHECK(request.sequence >= 0 && request.sequence < sequences);
      CHECK(shares[i].n >= 1 && shares[i].n <= request.length - request.held);
      CHECK(i >= answering.size() || answering.count(shares[i].request) == 1);
      total += shares[i].n;
      held[request.sequence] += shares[i].n;
      CHECK_INT(held[request.sequence], request.held + shares[i].n);
    }
    CHECK(shares.size() >= std::min(answering.size(), step_tokens));
    CHECK(total <= step_tokens);
    CHECK(used() <= capacity);
    // No two requests have the same sequence.
    CHECK_INT(
        held.size(),
        std::count_if(active.begin(), active.end(), [&](size_t number) {
          return held.count(scheduler.request(number).sequence) != 0 &&
                 (scheduler.request(number).held > 0 ||
                  std::any_of(
                      shares.begin(), shares.end(), [&](const auto& share) {
                        return share.request == number;
                      }));
        }) + static_cast<long>(idle.size()));

    scheduler.done(shares);
    for (const auto& share : shares) {
      const auto& request = scheduler.request(share.request);
      if (request.held == request.length) {
        ++made[share.request];
        scheduler.grow(share.request);
        if (made[share.request] == answers[share.request]) {
          scheduler.finish(share.request);
          active.erase(std::find(active.begin(), active.end(), share.request));
          idle.push_back(share.request);
        }
      }
    }
  }

  size_t capacity;
  size_t step_tokens;
  int32_t sequences;
  Scheduler scheduler;
  std::map<int32_t, size_t> held;
  std::vector<size_t> prompts;
  std::vector<size_t> answers;
  std::vector<size_t> made;
  std::vector<size_t> active;
  std::vector<size_t> idle;
  std::set<size_t> stuck;
  size_t n_preempted = 0;
  size_t n_evicted = 0;
};

/// Two requests that fit together run in the same steps.
void mixed_steps() {
  Simulation run(/*capacity=*/100, /*step_tokens=*/8, /*sequences=*/4);
  run.submit(6, 20);
  run.step();
  CHECK_INT(run.made[0], 1);
  run.submit(14, 3);
  Scheduler::Events events;
  const auto shares = must(run.scheduler.next(events));
  REQUIRE(shares.size() == 2);
  CHECK_INT(shares[0].request, 0);
  CHECK_INT(shares[0].n, 1);
  CHECK_INT(shares[1].request, 1);
  CHECK_INT(shares[1].n, 7);
}

/// If the cache fails to remove a sequence, the step returns the error, even if
/// the next removal would succeed.
void a_cache_that_fails() {
  std::vector<Result<void>> outcomes = {
      Error(ETKV_ERROR_STEP, "not now"), Result<void>()};
  size_t removed = 0;
  size_t room = 100;
  Scheduler scheduler(
      /*step_tokens=*/8,
      /*sequences=*/4,
      {[&](size_t n) { return n <= room; },
       [&](int32_t) { return outcomes.at(removed++); }});
  Scheduler::Events events;
  for (size_t i = 0; i < 2; ++i) {
    const size_t number = scheduler.submit(4);
    scheduler.done(must(scheduler.next(events)));
    scheduler.finish(number);
  }
  // The third request fits once both idle requests are removed.
  scheduler.submit(4);
  room = 0;
  CHECK_REFUSED(scheduler.next(events), ETKV_ERROR_STEP, "not now");
  CHECK_INT(removed, 1);
  CHECK(events.evicted.empty());
  CHECK(scheduler.request(0).state == Scheduler::State::idle);
  CHECK_INT(scheduler.request(0).held, 4);
}

/// All random requests in random caches are answered in full.
void all_are_answered() {
  size_t preempted = 0;
  size_t evicted = 0;
  size_t stuck = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    std::mt19937 rng(seed);
    const size_t capacity = 10 + rng() % 60;
    Simulation run(
        capacity, 1 + rng() % 16, 1 + static_cast<int32_t>(rng() % 5));
    const size_t n = 1 + rng() % 12;
    size_t steps = 0;
    for (size_t submitted = 0; submitted < n || run.scheduler.busy();) {
      if (submitted < n && rng() % 3 == 0) {
        run.submit(1 + rng() % (capacity / 2), 1 + rng() % (capacity));
        ++submitted;
      }
      run.step();
      REQUIRE(++steps < 100000);
    }
    for (size_t i = 0; i < n; ++i) {
      // The last id of an answer needs no cell.
      const bool fits = run.prompts[i] + run.answers[i] - 1 <= capacity;
      CHECK_INT(run.stuck.count(i), fits ? 0 : 1);
      CHECK_INT(
          run.made[i], fits ? run.answers[i] : capacity - run.prompts[i] + 1);
    }
    preempted += run.n_preempted;
    evicted += run.n_evicted;
    stuck += run.stuck.size();
  }
  std::printf(
      "%zu preempted, %zu evicted, %zu stuck\n", preempted, evicted, stuck);
  CHECK(preempted > 100 && evicted > 100 && stuck > 10);
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  mixed_steps();
  a_cache_that_fails();
  all_are_answered();
  return check_report();
}
