// Runs steps on a captured program and on an interpreted one. Each has its own
// cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "benches/captured/agreement.hpp"
#include "benches/captured/log.hpp"
#include "benches/common.hpp"
#include "etkv/executorch.hpp"
#include "etkv/prefix.hpp"
#include "examples/common/batch.hpp"
#include "examples/common/program.hpp"

namespace etkv::benches {

using examples::Batch;
using examples::Program;

/// A program with a cache, captured or interpreted.
template <typename C>
struct Side {
  Side(
      const char* model,
      const std::string& format,
      Passes passes,
      int32_t capacity,
      Logits rows = Logits::proposed)
      : program(must(Program::open(model))),
        session(must(
            CacheSession<C>::make(
                program.params().backend_id,
                make_config(
                    program.params(),
                    capacity,
                    format.empty() ? program.native_format() : format)))) {
    must(program.load(session.key(), rows, passes));
    must(warm_up(session.cache()));
  }

  C& cache() {
    return session.cache();
  }

  Program program;
  CacheSession<C> session;
};

/// Sequences of a step, with their numbers of tokens.
using Counts = std::vector<std::pair<int32_t, int>>;

/// Returns a token for each position of each sequence.
inline int64_t token_at(int64_t position, int32_t sequence, int64_t below) {
  return (position * 7919 + sequence * 31 + 1) % below;
}

/// Steps that both sides run.
template <typename C>
class Both {
 public:
  Both(const char* model, const std::string& format, int32_t capacity)
      : captured_(model, format, Passes::standard, capacity),
        interpreted_(model, format, Passes::interpreted, capacity) {}

  /// Changes the caches.
  template <typename Change>
  void change(const Change& change) {
    must(change(captured_.cache()));
    must(change(interpreted_.cache()));
  }

  /// Changes both caches, unless both refuse the change. Returns whether they
  /// changed.
  template <typename Change>
  bool try_to(const Change& change) {
    const auto done = change(captured_.cache());
    const auto other = change(interpreted_.cache());
    if (done.ok() != other.ok()) {
      must(done);
      must(other);
    }
    return done.ok();
  }

  /// Runs this many further tokens of each sequence.
  void run(const Counts& counts) {
    if (!try_run(counts)) {
      std::fprintf(stderr, "etkv_captured: a step is refused\n");
      std::exit(1);
    }
  }

  /// Does the same, but both sides may refuse the step. Returns whether the
  /// step ran.
  bool try_run(const Counts& counts) {
    Batch batch;
    for (const auto& [sequence, n] : counts) {
      const int64_t begin = must(captured_.cache().seq_next(sequence));
      for (int64_t at = begin; at < begin + n; ++at) {
        batch.add(token_at(at, sequence, below()), at, sequence);
      }
    }
    const auto found = batch.step(captured_.program, captured_.cache());
    const auto expected =
        batch.step(interpreted_.program, interpreted_.cache());
    if (!found.ok() && !expected.ok()) {
      return false;
    }
    agreement_.add(rows_of(must(found)), rows_of(must(expected)), batch.size());
    return true;
  }

  /// Runs this many tokens of the only sequence as text. In a step of text, a
  /// program returns only the last row of logits.
  void run_text(int n) {
    const int64_t begin = must(captured_.cache().seq_next(0));
    std::vector<int64_t> tokens;
    for (int64_t at = begin; at < begin + n; ++at) {
      tokens.push_back(token_at(at, 0, below()));
    }
    const auto step = [&](Side<C>& side) {
      const auto logits =
          must(side.program.step_at(tokens.data(), begin, tokens.size()));
      if (logits.rows != 1) {
        std::fprintf(
            stderr, "etkv_captured: text returned several rows of logits\n");
        std::exit(1);
      }
      return rows_of(logits);
    };
    const auto found = step(captured_);
    agreement_.add(found, step(interpreted_), 1);
  }

  /// Runs a proposed tree. Nodes without a parent are at position `base`.
  void run_tree(const std::vector<int32_t>& parents, int64_t base) {
    std::vector<int64_t> positions;
    std::vector<int64_t> tokens;
    for (size_t i = 0; i < parents.size(); ++i) {
      const int32_t parent = parents[i];
      positions.push_back(
          parent < 0 ? base : positions[static_cast<size_t>(parent)] + 1);
      tokens.push_back(
          token_at(positions.back(), static_cast<int32_t>(i), below()));
    }
    const auto step = [&](Side<C>& side) {
      return rows_of(must(
          side.program.step(tokens.data(), positions.data(), tokens.size())));
    };
    const auto found = step(captured_);
    agreement_.add(found, step(interpreted_), tokens.size());
  }

  /// Clears both caches, and attaches them to a prefix of `length` positions.
  void attach(int32_t length) {
    for (Side<C>* side : {&captured_, &interpreted_}) {
      const auto prefix = must(freeze(side->cache()));
      must(side->cache().clear());
      must(etkv::attach(side->cache(), prefix, length));
    }
  }

  /// The cache of the captured side; both have the same facts.
  C& cache() {
    return captured_.cache();
  }

  const Agreement& agreement() const {
    return agreement_;
  }

 private:
  int64_t below() const {
    return captured_.program.vocabulary();
  }

  Side<C> captured_;
  Side<C> interpreted_;
  Agreement agreement_;
};

/// Creates both sides and runs steps on them. Returns true if some steps were
/// captured and logits agree: they differ by no more than rounding explains,
/// and by at most the share `most` of the largest logit.
template <typename C, typename Run>
bool compare(
    const std::string& what,
    const Log& log,
    const char* model,
    const std::string& format,
    int32_t capacity,
    const Run& run,
    double most = 1.0) {
  // The warm-up may already have captured all steps.
  const size_t before = log.captured();
  Both<C> both(model, format, capacity);
  run(both);
  const Agreement& found = both.agreement();
  found.print(what.c_str());
  if (log.captured() == before) {
    std::fprintf(stderr, "etkv_captured: %s are not captured\n", what.c_str());
    return false;
  }
  if (!found.is_rounding() || !found.is_within(most)) {
    std::fprintf(
        stderr, "etkv_captured: %s differ by too much\n", what.c_str());
    return false;
  }
  return true;
}

} // namespace etkv::benches
