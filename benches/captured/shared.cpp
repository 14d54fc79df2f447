#include "benches/captured/shared.hpp"

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "benches/captured/agreement.hpp"
#include "benches/common.hpp"
#include "etkv/executorch.hpp"
#include "etkv/prefix.hpp"
#include "examples/common/batch.hpp"
#include "examples/common/program.hpp"

namespace etkv::benches {
namespace {

using examples::Batch;
using examples::Program;

constexpr int32_t kCapacity = 1024;

/// A program with a cache of its own, captured or not.
template <typename C>
struct Side {
  Side(
      const char* model,
      const std::string& format,
      Passes passes,
      Result<CacheSession<C>> (
          *make)(const std::string& backend, const CacheConfig& config))
      : program(must(Program::open(model))),
        session(must(make(
            program.params().backend_id,
            make_config(
                program.params(),
                kCapacity,
                format.empty() ? program.native_format() : format)))) {
    must(program.load(session.key(), Logits::all, passes));
    must(warm_up(session.cache()));
  }

  C& cache() {
    return session.cache();
  }

  Program program;
  CacheSession<C> session;
};

/// A token for each position of each sequence.
int64_t token_at(int64_t position, int32_t sequence, int64_t below) {
  return (position * 7919 + sequence * 31 + 1) % below;
}

/// Steps that both sides run alike.
template <typename C>
class Both {
 public:
  Both(
      const char* model,
      const std::string& format,
      Result<CacheSession<C>> (
          *make)(const std::string& backend, const CacheConfig& config))
      : captured_(model, format, Passes::standard, make),
        interpreted_(model, format, Passes::interpreted, make) {}

  /// Changes the caches.
  template <typename Change>
  void change(const Change& change) {
    must(change(captured_.cache()));
    must(change(interpreted_.cache()));
  }

  /// Runs so many tokens of each sequence, behind those that it has.
  void run(const std::vector<std::pair<int32_t, int>>& counts) {
    Batch batch;
    for (const auto& [sequence, n] : counts) {
      const int64_t begin = must(captured_.cache().seq_next(sequence));
      for (int64_t at = begin; at < begin + n; ++at) {
        batch.add(token_at(at, sequence, below()), at, sequence);
      }
    }
    const auto found =
        rows_of(must(batch.step(captured_.program, captured_.cache())));
    const auto expected =
        rows_of(must(batch.step(interpreted_.program, interpreted_.cache())));
    agreement_.add(found, expected, batch.size());
  }

  /// Runs a tree that was proposed, from position `base` on.
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

  /// Empties both caches, which then go on from what they held at `length`.
  void attach(int32_t length) {
    for (Side<C>* side : {&captured_, &interpreted_}) {
      const auto prefix = must(freeze(side->cache()));
      must(side->cache().clear());
      must(etkv::attach(side->cache(), prefix, length));
    }
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

void run_sequences(Both<SeqCache>& both) {
  both.run({{0, 40}});
  both.run({{1, 150}});
  both.run({{2, 9}});
  both.change([](SeqCache& cache) { return cache.seq_cp(0, 3); });
  for (int i = 0; i < 3; ++i) {
    both.run({{0, 1}, {1, 1}, {2, 1}, {3, 1}});
  }
  both.run({{1, 5}, {3, 1}, {2, 2}});
  // Cells that are free again lie between those of the others.
  both.change([](SeqCache& cache) { return cache.seq_rm(0); });
  both.change([](SeqCache& cache) { return cache.seq_rm(1, 100); });
  both.run({{4, 12}});
  for (int i = 0; i < 4; ++i) {
    both.run({{4, 1}, {2, 1}, {1, 1}, {3, 1}});
  }
  std::vector<std::pair<int32_t, int>> many;
  for (const int32_t most : {16, 33, 64}) {
    for (int32_t sequence = 1 + static_cast<int32_t>(many.size());
         sequence <= most;
         ++sequence) {
      many.emplace_back(sequence, 1);
    }
    for (int i = 0; i < 3; ++i) {
      both.run(many);
    }
  }
  both.change([](SeqCache& cache) { return cache.compact(); });
  both.run(many);
}

void run_attached(Both<SeqCache>& both) {
  both.run({{0, 150}});
  both.attach(150);
  both.run({{0, 1}});
  both.run({{0, 1}});
  both.run({{0, 90}});
  // A prefix behind a prefix, of which the cache goes on from a part.
  both.attach(200);
  both.run({{0, 5}});
  both.change([](SeqCache& cache) { return cache.seq_cp(0, 1); });
  for (int i = 0; i < 3; ++i) {
    both.run({{0, 1}, {1, 1}});
  }
  // Back into the prefix, which stays what it was.
  both.change([](SeqCache& cache) { return cache.seq_rm(0, 180); });
  both.run({{0, 1}});
  both.run({{0, 30}});
}

void run_trees(Both<TreeCache>& both) {
  both.run({{0, 100}});
  int64_t base = 100;
  const std::vector<int32_t> parents = {-1, 0, 0, 1, 1, 2, 5};
  for (int round = 0; round < 4; ++round) {
    both.change([&](TreeCache& cache) { return cache.propose(parents); });
    both.run_tree(parents, base);
    // The path through the last of each.
    both.change([](TreeCache& cache) { return cache.commit({0, 2, 5, 6}); });
    base += 4;
    both.run({{0, 1}});
    base += 1;
  }
}

} // namespace

bool compare_shared(
    const char* model,
    const std::string& format,
    const Log& log) {
  bool agree = true;
  const auto compare = [&](const char* what, auto&& both, auto run) {
    // Behind the warm-up of both sides, which captures steps as well.
    const size_t before = log.captured();
    run(both);
    const Agreement& found = both.agreement();
    found.print(what);
    if (log.captured() == before) {
      std::fprintf(stderr, "etkv_captured: %s are not captured\n", what);
      agree = false;
    } else if (!found.is_rounding()) {
      std::fprintf(stderr, "etkv_captured: %s are too far apart\n", what);
      agree = false;
    }
  };
  compare(
      "several sequences",
      Both<SeqCache>(model, format, make_seq_session),
      run_sequences);
  compare(
      "a sequence behind a prefix",
      Both<SeqCache>(model, format, make_seq_session),
      run_attached);
  compare(
      "trees", Both<TreeCache>(model, format, make_tree_session), run_trees);
  return agree;
}

} // namespace etkv::benches
