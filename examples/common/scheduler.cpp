#include "examples/common/scheduler.hpp"

#include <algorithm>
#include <utility>

#include "examples/common/try.hpp"

namespace etkv::examples {
namespace {

void erase(std::vector<size_t>& numbers, size_t number) {
  numbers.erase(
      std::remove(numbers.begin(), numbers.end(), number), numbers.end());
}

} // namespace

Scheduler::Scheduler(size_t step_tokens, int32_t sequences, Room room)
    : step_tokens_(step_tokens),
      sequences_(sequences),
      room_(std::move(room)) {}

size_t Scheduler::submit(size_t length) {
  Request request;
  request.length = length;
  requests_.push_back(request);
  waiting_.push_back(requests_.size() - 1);
  return requests_.size() - 1;
}

Result<std::vector<Scheduler::Share>> Scheduler::next(Events& events) {
  events = {};
  RETURN_IF_ERROR(keep_going(events));
  RETURN_IF_ERROR(admit(events));
  std::vector<Share> shares;
  size_t left = step_tokens_;
  // Answers come before prompts, because users wait for answers.
  for (const bool answering : {true, false}) {
    for (const size_t number : active_) {
      if ((rest(number) == 1) == answering && left > 0) {
        const size_t n = std::min(rest(number), left);
        shares.push_back({number, n});
        left -= n;
      }
    }
  }
  return shares;
}

Result<void> Scheduler::keep_going(Events& events) {
  const auto needed = [this] {
    size_t tokens = 0;
    for (const size_t number : active_) {
      tokens += rest(number);
    }
    return tokens;
  };
  for (;;) {
    ASSIGN_OR_RETURN(const bool fits, evict_until_fits(needed(), events));
    if (fits) {
      return {};
    }
    const size_t last = active_.back();
    if (active_.size() == 1) {
      events.stuck = last;
      finish(last);
      return {};
    }
    RETURN_IF_ERROR(release(last, State::waiting));
    // The request goes before all other waiting requests, because they arrived
    // later.
    waiting_.insert(waiting_.begin(), last);
    events.preempted.push_back(last);
  }
}

Result<void> Scheduler::admit(Events& events) {
  // A step that preempts a request admits no request: it would admit the
  // preempted one again.
  while (!waiting_.empty() && events.preempted.empty() && !events.stuck) {
    const size_t number = waiting_.front();
    size_t needed = rest(number);
    for (const size_t other : active_) {
      // Leave room for some tokens of its answer; otherwise it would soon be
      // preempted.
      constexpr size_t kAhead = 8;
      needed += rest(other) + kAhead;
    }
    ASSIGN_OR_RETURN(const bool fits, evict_until_fits(needed, events));
    if (!fits) {
      return {};
    }
    if (active_.size() + idle_.size() == static_cast<size_t>(sequences_)) {
      if (idle_.empty()) {
        return {};
      }
      RETURN_IF_ERROR(evict(events));
    }
    requests_[number].state = State::active;
    requests_[number].sequence = unused_sequence();
    waiting_.erase(waiting_.begin());
    active_.push_back(number);
    events.admitted.push_back(number);
  }
  return {};
}

int32_t Scheduler::unused_sequence() const {
  std::vector<bool> taken(static_cast<size_t>(sequences_), false);
  for (const auto* numbers : {&active_, &idle_}) {
    for (const size_t number : *numbers) {
      taken[static_cast<size_t>(requests_[number].sequence)] = true;
    }
  }
  return static_cast<int32_t>(
      std::find(taken.begin(), taken.end(), false) - taken.begin());
}

Result<bool> Scheduler::evict_until_fits(size_t tokens, Events& events) {
  for (;;) {
    ASSIGN_OR_RETURN(const bool fits, room_.fits(tokens));
    if (fits || idle_.empty()) {
      return fits;
    }
    RETURN_IF_ERROR(evict(events));
  }
}

Result<void> Scheduler::evict(Events& events) {
  const size_t oldest = idle_.front();
  RETURN_IF_ERROR(drop(oldest));
  events.evicted.push_back(oldest);
  return {};
}

void Scheduler::done(const std::vector<Share>& shares) {
  for (const Share& share : shares) {
    requests_[share.request].held += share.n;
  }
}

void Scheduler::finish(size_t request) {
  requests_[request].state = State::idle;
  erase(active_, request);
  idle_.push_back(request);
}

Result<void> Scheduler::drop(size_t request) {
  return release(request, State::gone);
}

Result<void> Scheduler::release(size_t number, State state) {
  Request& request = requests_[number];
  RETURN_IF_ERROR(room_.remove(request.sequence));
  request.held = 0;
  request.state = state;
  erase(active_, number);
  erase(idle_, number);
  return {};
}

bool Scheduler::busy() const {
  return !waiting_.empty() || !active_.empty();
}

} // namespace etkv::examples
