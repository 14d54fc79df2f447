#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "benches/captured/both.hpp"
#include "benches/captured/comparisons.hpp"
#include "etkv/executorch.hpp"

namespace etkv::benches {
namespace {

constexpr int32_t kCapacity = 1024;

void run_sequences(Both<SeqCache>& both) {
  both.run({{0, 40}});
  both.run({{1, 150}});
  both.run({{2, 9}});
  both.change([](SeqCache& cache) { return cache.seq_cp(0, 3); });
  for (int i = 0; i < 3; ++i) {
    both.run({{0, 1}, {1, 1}, {2, 1}, {3, 1}});
  }
  both.run({{1, 5}, {3, 1}, {2, 2}});
  // Now free cells are between the cells of other sequences.
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
  // A prefix that extends another prefix. The cache continues from a part of
  // the longer one.
  both.attach(200);
  both.run({{0, 5}});
  both.change([](SeqCache& cache) { return cache.seq_cp(0, 1); });
  for (int i = 0; i < 3; ++i) {
    both.run({{0, 1}, {1, 1}});
  }
  // A rewind into the prefix must not change the prefix.
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
    // The path through the last node of each level.
    both.change([](TreeCache& cache) { return cache.commit({0, 2, 5, 6}); });
    base += 4;
    both.run({{0, 1}});
    both.run_text(1 + 5 * round);
    base += 2 + 5 * round;
  }
}

} // namespace

bool compare_shared(
    const char* model,
    const std::string& format,
    const Log& log) {
  // Run all comparisons, even after a failure.
  const bool sequences = compare<SeqCache>(
      "several sequences", log, model, format, kCapacity, run_sequences);
  const bool attached = compare<SeqCache>(
      "a sequence after a prefix", log, model, format, kCapacity, run_attached);
  const bool trees =
      compare<TreeCache>("trees", log, model, format, kCapacity, run_trees);
  return sequences && attached && trees;
}

} // namespace etkv::benches
