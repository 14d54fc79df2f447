// Which tokens the next step has, where requests come while others are answered.
// Knows numbers only: the cache is asked through two functions.
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
  /// What the scheduler may ask of a cache.
  struct Room {
    /// Whether so many more positions fit.
    std::function<Result<bool>(size_t tokens)> fits;
    /// Gives back what a sequence holds.
    std::function<Result<void>(int32_t sequence)> remove;
  };

  enum class State {
    waiting, ///< holds nothing yet
    active,  ///< is read or answered
    idle,    ///< is answered, and held until there is need of its cells
    gone,    ///< holds nothing any more
  };

  struct Request {
    /// Ids of its prompt and its answer so far; the last is not held.
    size_t length = 0;
    /// Of these, those in the cache.
    size_t held = 0;
    State state = State::waiting;
    int32_t sequence = 0;
  };

  /// A share of a step: `n` tokens of a request, those after what it holds.
  struct Share {
    size_t request;
    size_t n;
  };

  /// What was decided besides, for people.
  struct Events {
    std::vector<size_t> admitted;
    /// Idle ones that were removed for others.
    std::vector<size_t> evicted;
    /// Active ones that were removed for others, and wait again.
    std::vector<size_t> preempted;
    /// One that is alone, and still does not fit.
    std::optional<size_t> stuck;
  };

  /// @param step_tokens  the most tokens of a step
  /// @param sequences    the most requests that hold anything, below 256
  Scheduler(size_t step_tokens, int32_t sequences, Room room);

  /// A request of so many ids has come; returns its number.
  size_t submit(size_t length);

  /// The shares of the next step: a token of each request that is being answered,
  /// then a prefill chunk of each that is read, oldest first, as far as the step goes.
  ///
  /// A request is admitted when the rest of all prompts, its own among them, and
  /// some tokens of each answer under way fit. Where they do not, the request that
  /// has been idle longest is evicted. Where not even what is left of the admitted
  /// prompts and the next tokens fit, the active request that was admitted last
  /// waits again, and is read anew later.
  ///
  /// An error where the cache does not give back what a request holds; that
  /// request stays as it was.
  Result<std::vector<Share>> next(Events& events);

  /// The step has been.
  void done(const std::vector<Share>& shares);

  /// A request has an id more.
  void grow(size_t request) {
    ++requests_[request].length;
  }

  /// A request is answered, and idle from now on.
  void finish(size_t request);

  /// Gives back what a request holds; it is no more.
  Result<void> drop(size_t request);

  const Request& request(size_t number) const {
    return requests_[number];
  }
  /// Whether any request waits or is active.
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
  /// Numbers of requests: those that wait and that are active, in the order they
  /// came in; those that are idle, longest first.
  std::vector<size_t> waiting_;
  std::vector<size_t> active_;
  std::vector<size_t> idle_;
};

} // namespace etkv::examples
