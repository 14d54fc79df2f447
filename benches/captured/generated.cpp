#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "benches/captured/agreement.hpp"
#include "benches/captured/both.hpp"
#include "benches/captured/comparisons.hpp"
#include "etkv/executorch.hpp"

namespace etkv::benches {
namespace {

/// The capacity of the caches. It is so small that operations reach it.
constexpr int32_t kCapacity = 384;
constexpr int kOperations = 40;
/// The number of sequences that operations use, and the maximum tokens of a
/// step.
constexpr int32_t kSequences = 8;
constexpr int kMaxTokens = 64;
/// The maximum difference of logits in float16, as a share of the largest
/// logit: for floats and for codes. For comparison: a tiny model has a
/// difference of 0.013 if one of 300 keys is missing, and 0.06 if one of 60 is
/// missing. If one key is rounded the other way before it is stored as codes,
/// the difference is 0.03.
constexpr double kFloats = 0.004;
constexpr double kCodes = 0.06;

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}

  /// Returns a number from `least` to `most`.
  int32_t in(int32_t least, int32_t most) {
    const auto span = static_cast<uint32_t>(most - least) + 1;
    return least + static_cast<int32_t>(engine_() % span);
  }

 private:
  // Unlike the distributions of std, this gives the same numbers on every
  // platform.
  std::mt19937 engine_;
};

/// Returns the sequences of a step, with their numbers of tokens.
Counts some_tokens(Random& random) {
  Counts counts;
  // One token of each of many sequences, or several tokens of each of a few.
  if (random.in(0, 3) == 0) {
    const int32_t n = random.in(2, kMaxTokens);
    for (int32_t sequence = 0; sequence < n; ++sequence) {
      counts.emplace_back(sequence, 1);
    }
    return counts;
  }
  int left = kMaxTokens;
  for (int32_t sequence = 0; sequence < kSequences; ++sequence) {
    if (random.in(0, 2) == 0) {
      const int n = std::min(left, random.in(0, 3) == 0 ? 24 : random.in(1, 3));
      if (n > 0) {
        counts.emplace_back(sequence, n);
      }
      left -= n;
    }
  }
  if (counts.empty()) {
    counts.emplace_back(0, random.in(1, 5));
  }
  return counts;
}

/// Declares a step, cancels it, and then runs it. If the step does not fit,
/// both caches refuse it and do not change.
template <typename C>
void run_some(Both<C>& both, const Counts& counts) {
  std::vector<int32_t> sequences;
  for (const auto& [sequence, n] : counts) {
    sequences.insert(sequences.end(), static_cast<size_t>(n), sequence);
  }
  both.try_to([&](C& cache) { return cache.begin_step(sequences); });
  both.try_to([](C& cache) { return cache.cancel_step(); });
  if (!both.try_run(counts)) {
    both.try_to([](C& cache) { return cache.cancel_step(); });
  }
}

/// Changes the contents of sequences.
template <typename C>
void change_some(Both<C>& both, Random& random) {
  const int32_t one = random.in(0, kSequences - 1);
  const int32_t other = random.in(0, kSequences - 1);
  const int32_t next = must(both.cache().seq_next(one));
  const int32_t at = random.in(0, next);
  switch (random.in(0, 6)) {
    case 0:
    case 1:
      // A copy needs an empty target.
      both.try_to([&](C& cache) { return cache.seq_rm(other); });
      both.try_to([&](C& cache) { return cache.seq_cp(one, other); });
      return;
    case 2:
      both.try_to([&](C& cache) { return cache.seq_rm(one, at); });
      return;
    case 3:
      both.try_to([&](C& cache) { return cache.seq_rm(one, at, at + 3); });
      return;
    case 4:
      both.try_to([&](C& cache) { return cache.seq_rm(one); });
      return;
    case 5:
      both.try_to([](C& cache) { return cache.compact(); });
      return;
    default:
      if (random.in(0, 3) == 0) {
        both.try_to([&](C& cache) { return cache.seq_keep(one); });
      }
      return;
  }
}

void run_sequences(Both<SeqCache>& both, Random& random) {
  if (random.in(0, 3) == 0) {
    const int32_t n = random.in(1, 120);
    for (int32_t at = 0; at < n; at += kMaxTokens) {
      both.run({{0, std::min(kMaxTokens, n - at)}});
    }
    const int32_t least = must(both.cache().rewindable_to());
    both.attach(random.in(std::max(least, 1), n));
  }
  for (int i = 0; i < kOperations; ++i) {
    if (random.in(0, 2) == 0) {
      change_some(both, random);
    } else {
      run_some(both, some_tokens(random));
    }
  }
}

/// Proposes a tree, runs it, and accepts one of its paths or nothing.
void run_tree(Both<TreeCache>& both, Random& random) {
  const int32_t base = must(both.cache().seq_next(0));
  std::vector<int32_t> parents;
  const int32_t n = random.in(1, 16);
  for (int32_t node = 0; node < n; ++node) {
    parents.push_back(node == 0 ? -1 : random.in(-1, node - 1));
  }
  if (!both.try_to([&](TreeCache& cache) { return cache.propose(parents); })) {
    return;
  }
  both.run_tree(parents, base);
  std::vector<int32_t> path;
  if (random.in(0, 4) > 0) {
    for (int32_t node = random.in(0, n - 1); node >= 0;
         node = parents[static_cast<size_t>(node)]) {
      path.insert(path.begin(), node);
    }
  }
  both.change([&](TreeCache& cache) { return cache.commit(path); });
}

void run_trees(Both<TreeCache>& both, Random& random) {
  both.run({{0, random.in(1, kMaxTokens)}});
  for (int i = 0; i < kOperations; ++i) {
    switch (random.in(0, 5)) {
      case 0:
        if (random.in(0, 1) == 0) {
          run_some(both, {{0, random.in(1, 9)}});
        } else if (both.cache().can_extend(kMaxTokens).value_or(false)) {
          both.run_text(random.in(1, kMaxTokens));
        }
        break;
      case 1: {
        const int32_t length = must(both.cache().seq_next(0));
        const int32_t to = std::max(1, length - random.in(0, 20));
        both.try_to([&](TreeCache& cache) { return cache.rewind(to); });
        break;
      }
      default:
        run_tree(both, random);
    }
  }
}

} // namespace

bool compare_generated(
    const char* model,
    const std::string& format,
    uint32_t seeds,
    const Log& log) {
  const bool is_float16 = must(Program::open(model)).native_format() == "f16";
  const double of_float16 = format.empty() ? kFloats : kCodes;
  const double most = is_float16 ? of_float16 : 1.0;
  const std::string of = " (seeds 1 to " + std::to_string(seeds) + ")";
  const auto all_seeds = [&](auto run) {
    return [seeds, run](auto& both) {
      for (uint32_t seed = 1; seed <= seeds; ++seed) {
        Random random(seed);
        both.change([](auto& cache) { return cache.clear(); });
        run(both, random);
      }
    };
  };
  const bool sequences = compare<SeqCache>(
      "generated operations on sequences" + of,
      log,
      model,
      format,
      kCapacity,
      all_seeds(run_sequences),
      most);
  const bool trees = compare<TreeCache>(
      "generated operations on trees" + of,
      log,
      model,
      format,
      kCapacity,
      all_seeds(run_trees),
      most);
  return sequences && trees;
}

} // namespace etkv::benches
