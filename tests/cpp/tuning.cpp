// How far drafts go: what steps take, and the depth and width that pay.

#include <map>
#include <set>

#include "examples/speculation/latency_model.hpp"
#include "examples/speculation/tuner.hpp"
#include "speculative.hpp"

namespace etkv::tests {
namespace {

using examples::LatencyModel;
using examples::Tuner;

void latency() {
  LatencyModel latency;
  CHECK(latency.at(5) == 0.0);
  latency.add(1, 2.0);
  CHECK(latency.at(9) == 2.0);
  latency.add(5, 4.0);
  CHECK(latency.at(1) == 2.0);
  CHECK(latency.at(3) == 3.0);
  CHECK(latency.at(9) == 6.0);
  // The shortest of the first four of a size counts, and then a mean.
  latency.add(5, 8.0);
  CHECK(latency.at(5) == 4.0);
  latency.add(5, 3.0);
  CHECK(latency.at(5) == 3.0);
  latency.add(5, 9.0);
  CHECK(latency.at(5) == 3.0);
  latency.add(5, 4.0);
  CHECK(latency.at(5) == 3.25);
  latency.add(5, 2.25);
  CHECK(latency.at(5) == 3.0);
  // One number that has settled is no line; of two, nothing else counts.
  CHECK(latency.at(1) == 2.0);
  latency.add(1, 1.0);
  CHECK(latency.at(1) == 1.0);
  latency.add(3, 100.0);
  CHECK(latency.at(3) == 2.0);
  CHECK(latency.at(9) == 5.0);

  // More tokens never take less, whatever is measured, nor do fewer give time back.
  LatencyModel uneven;
  for (int time = 0; time < 2; ++time) {
    uneven.add(1, 2.0);
    uneven.add(5, 5.0);
    uneven.add(9, 1.0);
  }
  CHECK(uneven.at(9) == 5.0);
  CHECK(uneven.at(20) == 5.0);
  uneven.add(12, 6.0);
  uneven.add(12, 6.0);
  CHECK(uneven.at(9) == 5.0);
  CHECK(uneven.at(10.5) == 5.5);
  CHECK(uneven.at(15) == 7.0);
  for (double n = 0.0; n < 20.0; n += 0.5) {
    CHECK(uneven.at(n) <= uneven.at(n + 0.5));
  }
  // An exception counts as half more than the mean.
  LatencyModel steady;
  for (int time = 0; time < 4; ++time) {
    steady.add(7, 8.0);
  }
  steady.add(7, 800.0);
  CHECK(steady.at(7) == 9.0);
  LatencyModel far;
  far.add(10, 1.0);
  far.add(20, 3.0);
  CHECK(far.at(1) == 1.0);
  CHECK(far.at(15) == 2.0);
}

/// Lets a tuner have its way in a world where a forward of n tokens takes
/// `fixed + each * n`, and candidates of each rank are right so often; returns the
/// shape that it ends with. The first forward of each n takes `once` more.
TreeShape settle(
    double fixed,
    double each,
    const std::vector<double>& ranks,
    double draft = 0.0,
    std::optional<int64_t> depth = std::nullopt,
    std::optional<int64_t> width = std::nullopt,
    double once = 0.0) {
  Tuner tuner(depth, width);
  Rng rng(1);
  const auto seconds = [&](int64_t levels, int64_t) {
    return draft * static_cast<double>(levels);
  };
  std::map<std::pair<int64_t, int64_t>, int> chosen;
  std::set<size_t> run;
  for (int step = 0; step < 600; ++step) {
    const auto shape = tuner.next(seconds);
    TokenTree tree(0);
    VerificationResult verified{{0}, 0};
    std::vector<int32_t> level = {0};
    for (int64_t i = 0; i < shape.depth; ++i) {
      // All candidates hang on the first of the level before.
      const int32_t parent = level[0];
      level.clear();
      double at = rng.uniform();
      for (int64_t rank = 0; rank < shape.width; ++rank) {
        const int32_t node = tree.add(rank, parent);
        level.push_back(node);
        const double right =
            rank < static_cast<int64_t>(ranks.size()) ? ranks[rank] : 0.0;
        if (at >= 0.0 && at < right && verified.accepted.back() == parent) {
          verified.accepted.push_back(node);
        }
        at -= right;
      }
      // The accepted one is the one that goes on.
      if (verified.accepted.back() >= level[0]) {
        level[0] = verified.accepted.back();
      }
    }
    const double first = run.insert(tree.size()).second ? once : 0.0;
    tuner.observe(
        shape,
        tree,
        verified,
        first + fixed + each * static_cast<double>(tree.size()),
        draft * static_cast<double>(shape.depth));
    if (step >= 300) {
      ++chosen[{shape.depth, shape.width}];
    }
  }
  const auto most = std::max_element(
      chosen.begin(), chosen.end(), [](const auto& a, const auto& b) {
        return a.second < b.second;
      });
  return {most->first.first, most->first.second, 0};
}

/// Returns how many of 1,000 steps of a second have a tree, none of which is right,
/// if a draft takes so many seconds.
int trials(double draft) {
  Tuner tuner(std::nullopt, std::nullopt);
  const auto seconds = [&](int64_t, int64_t) { return draft; };
  int tried = 0;
  for (int step = 0; step < 1000; ++step) {
    const auto shape = tuner.next(seconds);
    TokenTree tree(0);
    if (shape.depth > 0) {
      tree.add(1, 0);
      ++tried;
    }
    const double seconds_of_model =
        0.8 + 0.2 * static_cast<double>(tree.size());
    tuner.observe(
        shape, tree, {{0}, 0}, seconds_of_model, shape.depth > 0 ? draft : 0.0);
  }
  return tried;
}

void patience() {
  // A trial every 17th step where drafts are cheap, and 1 of 100 seconds otherwise.
  const int cheap = trials(0.01);
  CHECK(cheap >= 55 && cheap <= 70);
  const int dear = trials(2.0);
  CHECK(dear >= 5 && dear <= 10);
  // They do not end.
  CHECK(trials(1000.0) >= 4);
}

/// Returns the steps before the first tree, and those between it and the second, if
/// a step of one token takes a second and a draft so many, and none is right.
std::pair<int, int> first_trials(double draft) {
  Tuner tuner(std::nullopt, std::nullopt);
  std::vector<int> at;
  for (int step = 0; at.size() < 2 && step < 1000; ++step) {
    const auto shape = tuner.next([&](int64_t depth, int64_t width) {
      CHECK(depth <= Tuner::kDeepest && width <= Tuner::kWidest);
      return draft;
    });
    TokenTree tree(0);
    if (shape.depth > 0) {
      CHECK_INT(shape.width, 1);
      tree.add(1, 0);
      at.push_back(step);
    }
    const double seconds = 0.2 + 0.8 * static_cast<double>(tree.size());
    tuner.observe(
        shape, tree, {{0}, 0}, seconds, shape.depth > 0 ? draft : 0.0);
  }
  CHECK_INT(at.size(), 2);
  return {at[0], at[1] - at[0] - 1};
}

void first_patience() {
  using Steps = std::pair<int, int>;
  // Free drafts are tried once a step is measured; dear ones wait until they take
  // 1 of 50 seconds, but not for long.
  CHECK(first_trials(0.0) == Steps(4, 0));
  CHECK(first_trials(0.25) == Steps(13, 13));
  CHECK(first_trials(10.0) == Steps(32, 32));
}

/// Returns how many trees a tuner still asks for once none is right any more, in 50
/// steps behind as many that were all right. A draft takes no time.
int trees_until_noticed() {
  Tuner tuner(std::nullopt, /*width=*/1);
  int asked = 0;
  for (int step = 0; step < 100; ++step) {
    const auto shape = tuner.next([](int64_t, int64_t) { return 0.0; });
    TokenTree tree(0);
    VerificationResult verified{{0}, 0};
    for (int64_t i = 0; i < shape.depth; ++i) {
      const int32_t node = tree.add(1, static_cast<int32_t>(i));
      if (step < 50) {
        verified.accepted.push_back(node);
      }
    }
    asked += step >= 50 && shape.depth > 0 ? 1 : 0;
    tuner.observe(
        shape,
        tree,
        verified,
        0.7 + 0.3 * static_cast<double>(tree.size()),
        /*draft_seconds=*/0.0);
  }
  return asked;
}

/// A step without a tree is measured again where trees pay, however rare.
void remeasuring() {
  Tuner tuner(std::nullopt, /*width=*/1);
  int singles = 0;
  for (int step = 0; step < 1000; ++step) {
    const auto shape = tuner.next([](int64_t, int64_t) { return 0.0; });
    TokenTree tree(0);
    VerificationResult verified{{0}, 0};
    for (int64_t i = 0; i < shape.depth; ++i) {
      verified.accepted.push_back(tree.add(1, static_cast<int32_t>(i)));
    }
    singles += shape.depth == 0 ? 1 : 0;
    tuner.observe(shape, tree, verified, /*seconds=*/1.0, 0.0);
  }
  // Four at the beginning, and one of 257 steps.
  CHECK_INT(singles, 7);
}

void noticing() {
  // Some until then, and a trial every 17th step.
  const int asked = trees_until_noticed();
  CHECK(asked >= 2 && asked <= 9);
}

void tuning() {
  // Verification costs next to nothing more: as deep and wide as may be.
  auto shape = settle(1.0, 0.001, {0.6, 0.3});
  CHECK(shape.depth >= 5 && shape.width >= 2);
  // Every token costs the same: nothing pays.
  shape = settle(0.0, 1.0, {0.6, 0.1});
  CHECK_INT(shape.depth, 0);
  // Draft tokens are never right.
  shape = settle(1.0, 0.1, {});
  CHECK_INT(shape.depth, 0);
  // the second draft token is never right, and costs.
  shape = settle(1.0, 0.1, {0.8});
  CHECK(shape.depth >= 2 && shape.width == 1);
  // The draft costs as much as the model.
  shape = settle(1.0, 0.1, {0.5}, /*draft=*/1.0);
  CHECK_INT(shape.depth, 0);
  // What is made once, however long that takes, changes none of it.
  for (const double once : {1.0, 100.0}) {
    shape = settle(1.0, 0.001, {0.6, 0.3}, 0.0, {}, {}, once);
    CHECK(shape.depth >= 5 && shape.width >= 2);
    shape = settle(0.0, 1.0, {0.6, 0.1}, 0.0, {}, {}, once);
    CHECK_INT(shape.depth, 0);
    shape = settle(1.0, 0.1, {0.8}, 0.0, {}, {}, once);
    CHECK(shape.depth >= 2 && shape.width == 1);
  }
  // What is given stays.
  shape = settle(0.0, 1.0, {0.6}, 0.0, /*depth=*/4);
  CHECK_INT(shape.depth, 4);
  // Also where it is further than the tuner would look.
  shape = settle(1.0, 0.001, {0.6, 0.3}, 0.0, std::nullopt, /*width=*/9);
  CHECK(shape.depth >= 3 && shape.width == 9);
  shape = settle(1.0, 0.001, {0.3, 0.3, 0.3}, 0.0, /*depth=*/7);
  CHECK(shape.depth == 7 && shape.width >= 3);
  shape = settle(1.0, 0.001, {0.3, 0.3, 0.3}, 0.0, /*depth=*/64);
  CHECK(shape.depth == 64 && shape.width >= 3);
  // It begins with a step of one token and with chains.
  Tuner fresh(std::nullopt, std::nullopt);
  const auto free = [](int64_t, int64_t) { return 0.0; };
  for (const int64_t depth : {0, 0, 0, 0, 3, 3}) {
    const auto first = fresh.next(free);
    CHECK_INT(first.depth, depth);
    CHECK(depth == 0 || first.width == 1);
    TokenTree tree(0);
    for (int64_t i = 0; i < depth; ++i) {
      tree.add(1, static_cast<int32_t>(i));
    }
    fresh.observe(first, tree, {{0}, 0}, 1.0, 0.0);
  }
  Tuner fixed(2, 3);
  const auto both = fixed.next([](int64_t, int64_t) { return 0.0; });
  CHECK(both.depth == 2 && both.width == 3);
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  latency();
  tuning();
  patience();
  first_patience();
  noticing();
  remeasuring();
  return check_report();
}
