// The scheduler chooses the tokens of each step while some requests arrive and
// others are answered. It stores only numbers, and accesses the cache through
// two functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "etkv/etkv.hpp"

namespace etkv::examples {

class Scheduler {
 public:
  /// The functions of a cache that the scheduler calls.
  struct Room {
    /// Returns whether this many more positions fit.
    std::function<Result<bool>(size_t tokens)> fits;
    /// Removes a sequence from the cache.
    std::function<Result<void>(int32_t sequence)> remove;
  };

  enum class State {
    waiting, ///< holds nothing yet
    active,  ///< its prompt or answer is running
    idle,    ///< is answered, and stays until its cells are needed
    gone,    ///< is removed
  };

  struct Request {
    /// The number of ids of the prompt and of the answer so far. The last id is
    /// not in the cache.
    size_t length = 0;
    /// The number of the request's ids in the cache.
    size_t held = 0;
    State state = State::waiting;
    int32_t sequence = 0;
  };

  /// A share of a step: the next `n` tokens of a request that have not run.
  struct Share {
    size_t request;
    size_t n;
  };

  /// Decisions of a step, for messages.
  struct Events {
    std::vector<size_t> admitted;
    /// Idle requests that were removed for others.
    std::vector<size_t> evicted;
    /// Active requests that were removed for others and wait again.
    std::vector<size_t> preempted;
    /// A request that does not fit although no other request holds positions.
    std::optional<size_t> stuck;
  };

  /// @param step_tokens  the maximum tokens of a step
  /// @param sequences    the maximum requests that hold positions, below 256
  Scheduler(size_t step_tokens, int32_t sequences, Room room);

  /// Adds a request of this many ids; returns its number.
  size_t submit(size_t length);

  /// Returns the shares of the next step: one token of each running answer,
  /// then a prefill chunk of each running prompt, oldest first. A step has at
  /// most `step_tokens` tokens.
  ///
  /// A request is admitted if three things fit together: the rest of the
  /// running prompts, the request's prompt, and some tokens of each running
  /// answer. If they do not fit, the request that has been idle longest is
  /// evicted. If not even the rest of the running prompts and the next tokens
  /// fit, the active request that was admitted last is preempted.
  ///
  /// Returns an error if the cache fails to remove a request. The request then
  /// stays as it was.
  Result<std::vector<Share>> next(Events& events);

  /// Records that a step with these shares has committed.
  void done(const std::vector<Share>& shares);

  /// Adds one id to a request.
  void grow(size_t request) {
    ++requests_[request].length;
  }

  /// Records that a request is answered. The request is then idle.
  void finish(size_t request);

  /// Removes a request and the positions that it holds.
  Result<void> drop(size_t request);

  const Request& request(size_t number) const {
    return requests_[number];
  }
  /// Returns whether any request waits or is active.
  bool busy() const;

 private:
  size_t rest(size_t number) const {
    return requests_[number].length - requests_[number].held;
  }
  /// Makes `tokens` fit by evicting idle requests, longest idle first.
  Result<bool> evict_until_fits(size_t tokens, Events& events);
  Result<void> evict(Events& events);
  Result<void> keep_going(Events& events);
  Result<void> admit(Events& events);
  int32_t unused_sequence() const;
  Result<void> release(size_t number, State state);

  size_t step_tokens_;
  int32_t sequences_;
  Room room_;
  std::vector<Request> requests_;
  /// Numbers of requests: the waiting and the active ones in order of arrival,
  /// and the idle ones, longest idle first.
  std::vector<size_t> waiting_;
  std::vector<size_t> active_;
  std::vector<size_t> idle_;
};

} // namespace etkv::examples
