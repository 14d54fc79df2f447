// Tuning of drafts: the cost of steps, and the best depth and width.

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "examples/speculation/latency_model.hpp"
#include "examples/speculation/tuner.hpp"
#include "speculative.hpp"

namespace etkv::tests {
namespace {

using examples::LatencyModel;
using examples::Tuner;

/// Returns a chain of `depth` candidates.
TokenTree chain(int64_t depth) {
  TokenTree tree(0);
  for (int64_t i = 0; i < depth; ++i) {
    tree.add(1, static_cast<int32_t>(i));
  }
  return tree;
}

/// Returns the result for a chain whose first `n` candidates are right.
VerificationResult accepted(int64_t n) {
  VerificationResult verified{{}, 0};
  for (int64_t node = 0; node <= n; ++node) {
    verified.accepted.push_back(static_cast<int32_t>(node));
  }
  return verified;
}

/// The maximum tested number of tokens, slightly more than the largest tree.
constexpr double kMaxLength = 64.0;

/// Checks that more tokens never take less time, and that each number of tokens
/// has a time.
void check_rises(const LatencyModel& latency) {
  for (double n = 0.0; n < kMaxLength; n += 0.5) {
    CHECK(latency.at(n) >= 0.0 && std::isfinite(latency.at(n)));
    // The factor allows for rounding.
    CHECK(latency.at(n) <= latency.at(n + 0.5) * (1.0 + 1e-12));
  }
}

bool near(double found, double expected) {
  return std::abs(found - expected) <= 1e-9 * std::abs(expected);
}

/// Whatever was measured, estimated times increase with the number of tokens,
/// lie between measured times, and scale with the unit.
void any_measurements() {
  CHECK(LatencyModel().at(5) == 0.0);
  Rng rng(3);
  for (int world = 0; world < 50; ++world) {
    LatencyModel latency;
    LatencyModel thousandfold;
    double least = 1e9;
    double most = 0.0;
    size_t longest = 0;
    for (int i = 0; i < 1 + 2 * world; ++i) {
      const auto n = static_cast<size_t>(1.0 + 30.0 * rng.uniform());
      const double seconds = 0.1 + rng.uniform();
      latency.add(n, seconds);
      thousandfold.add(n, 1000.0 * seconds);
      least = std::min(least, seconds);
      most = std::max(most, seconds);
      longest = std::max(longest, n);
      check_rises(latency);
    }
    for (double n = 1.0; n <= static_cast<double>(longest); n += 0.5) {
      CHECK(near(thousandfold.at(n), 1000.0 * latency.at(n)));
      CHECK(latency.at(n) >= least);
    }
    CHECK(latency.at(1) <= most);
  }
}

/// If times are on a line, the model returns that line between and after the
/// measured numbers of tokens. It does not matter how long the first forward of
/// each number takes.
void a_line() {
  for (const double once : {0.0, 7.0}) {
    for (const double each : {0.0, 0.001, 2.0}) {
      LatencyModel latency;
      const auto line = [&](double n) { return 0.5 + each * n; };
      for (const size_t n : {9, 1, 5}) {
        latency.add(n, line(static_cast<double>(n)) + once);
        latency.add(n, line(static_cast<double>(n)));
      }
      // A single measurement does not count if others are repeated.
      latency.add(7, 100.0);
      for (double n = 1.0; n < kMaxLength; n += 0.5) {
        CHECK(near(latency.at(n), line(n)));
      }
      // Before the first point the time is constant.
      CHECK(latency.at(0.5) == latency.at(1));
    }
  }
}

/// A single outlier does not count; a lasting change does.
void exceptions() {
  LatencyModel latency;
  for (int time = 0; time < 8; ++time) {
    latency.add(7, 8.0);
  }
  CHECK(near(latency.at(7), 8.0));
  latency.add(7, 800.0);
  const double after = latency.at(7);
  CHECK(after > 8.0 && after < 1.5 * 8.0);
  for (int time = 0; time < 8; ++time) {
    latency.add(7, 8.0);
  }
  CHECK(latency.at(7) < after);
  // A lasting change to slower or faster steps.
  for (const double seconds : {20.0, 2.0}) {
    double before = std::abs(latency.at(7) - seconds);
    for (int time = 0; time < 30; ++time) {
      latency.add(7, seconds);
      const double distance = std::abs(latency.at(7) - seconds);
      CHECK(distance <= before);
      before = distance;
    }
    CHECK(before < 0.05 * seconds);
  }
}

/// Returns the expected ids per second of a shape, with the times of `latency`.
double promise(
    const TreeShape& shape,
    const Tuner& tuner,
    const LatencyModel& latency,
    double draft_seconds) {
  double ids = 0.0;
  for (int64_t level = 0; level <= shape.depth; ++level) {
    ids += std::pow(tuner.acceptance(shape.width), level);
  }
  const auto nodes = static_cast<double>(1 + shape.depth * shape.width);
  return ids / (latency.at(nodes) + (shape.depth == 0 ? 0.0 : draft_seconds));
}

/// Returns the maximum expected ids per second of all shapes.
double best_promise(
    const Tuner& tuner,
    const LatencyModel& latency,
    const Tuner::DraftSeconds& draft_seconds) {
  double best = 0.0;
  for (int64_t depth = 0; depth <= Tuner::kDeepest; ++depth) {
    for (int64_t width = 1; width <= Tuner::kWidest; ++width) {
      TreeShape shape;
      shape.depth = depth;
      shape.width = width;
      const double seconds = draft_seconds(depth, width);
      best = std::max(best, promise(shape, tuner, latency, seconds));
    }
  }
  return best;
}

/// Runs a tuner, and returns the final shape. A forward of n tokens takes
/// `fixed + each * n` seconds, and `once` more the first time. Candidates of
/// rank r are right with probability `ranks[r]`. Checks that no other shape has
/// more expected ids per second, except in trials.
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
  LatencyModel latency;
  int trees = 0;
  int compared = 0;
  bool had_tree = false;
  for (int step = 0; step < 600; ++step) {
    const auto shape = tuner.next(seconds);
    // A trial follows steps without a tree. So does the first tree.
    if (trees >= 2 && had_tree && shape.depth > 0 && !depth && !width) {
      const double best = best_promise(tuner, latency, seconds);
      const double draft_seconds = seconds(shape.depth, shape.width);
      const double found = promise(shape, tuner, latency, draft_seconds);
      CHECK(near(found, best));
      ++compared;
    }
    had_tree = shape.depth > 0;
    trees += had_tree ? 1 : 0;
    TokenTree tree(0);
    VerificationResult verified{{0}, 0};
    std::vector<int32_t> level = {0};
    for (int64_t i = 0; i < shape.depth; ++i) {
      // All candidates of a level are children of one node of the level before.
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
      // The next level's candidates are children of the accepted candidate.
      if (verified.accepted.back() >= level[0]) {
        level[0] = verified.accepted.back();
      }
    }
    const double first = run.insert(tree.size()).second ? once : 0.0;
    const double took = first + fixed + each * static_cast<double>(tree.size());
    latency.add(tree.size(), took);
    tuner.observe(
        shape, tree, verified, took, draft * static_cast<double>(shape.depth));
    if (step >= 300) {
      ++chosen[{shape.depth, shape.width}];
    }
  }
  const auto most = std::max_element(
      chosen.begin(), chosen.end(), [](const auto& a, const auto& b) {
        return a.second < b.second;
      });
  CHECK(compared > 0 || most->first.first == 0 || depth || width);
  return {most->first.first, most->first.second, 0};
}

/// Returns how many of 1,000 steps have a tree if no draft token is right. A
/// step takes one second, and a draft `draft` seconds.
int trials(double draft) {
  Tuner tuner(std::nullopt, std::nullopt);
  const auto seconds = [&](int64_t, int64_t) { return draft; };
  int tried = 0;
  for (int step = 0; step < 1000; ++step) {
    const auto shape = tuner.next(seconds);
    const bool drafts = shape.depth > 0;
    const TokenTree tree = chain(drafts ? 1 : 0);
    tried += drafts ? 1 : 0;
    const double seconds_of_model =
        0.8 + 0.2 * static_cast<double>(tree.size());
    tuner.observe(
        shape, tree, accepted(0), seconds_of_model, drafts ? draft : 0.0);
  }
  return tried;
}

void patience() {
  // A trial at each 17th step if drafts are cheap; otherwise 1 per cent of the
  // time.
  const int cheap = trials(0.01);
  CHECK(cheap >= 55 && cheap <= 70);
  const int dear = trials(2.0);
  CHECK(dear >= 5 && dear <= 10);
  // Trials never stop.
  CHECK(trials(1000.0) >= 4);
}

/// Returns the number of steps before the first tree, and between the first and
/// the second, if no draft token is right. A step of one token takes one
/// second, and a draft `draft` seconds.
std::pair<int, int> first_trials(double draft) {
  Tuner tuner(std::nullopt, std::nullopt);
  std::vector<int> at;
  for (int step = 0; at.size() < 2 && step < 1000; ++step) {
    const auto shape = tuner.next([&](int64_t depth, int64_t width) {
      CHECK(depth <= Tuner::kDeepest && width <= Tuner::kWidest);
      return draft;
    });
    const bool drafts = shape.depth > 0;
    const TokenTree tree = chain(drafts ? 1 : 0);
    if (drafts) {
      CHECK_INT(shape.width, 1);
      at.push_back(step);
    }
    const double seconds = 0.2 + 0.8 * static_cast<double>(tree.size());
    tuner.observe(shape, tree, accepted(0), seconds, drafts ? draft : 0.0);
  }
  CHECK_INT(at.size(), 2);
  return {at[0], at[1] - at[0] - 1};
}

void first_patience() {
  // Free drafts are tried as soon as a step is measured, and then at each step.
  const auto [measured, between] = first_trials(0.0);
  CHECK(measured <= 10 && between == 0);
  // Slower drafts wait until the draft takes about 2 per cent of the time or
  // less.
  auto before = std::make_pair(measured, between);
  for (const double draft : {0.05, 0.1, 0.25, 0.5}) {
    const auto found = first_trials(draft);
    CHECK(found.first >= before.first && found.second >= before.second);
    const double waited = draft / 0.02;
    CHECK(std::abs(std::max<double>(measured, waited) - found.first) <= 1.0);
    CHECK(std::abs(waited - found.second) <= 1.0);
    before = found;
  }
  // The wait is bounded, however long drafts take.
  const auto longest = first_trials(10.0);
  CHECK(longest == first_trials(1000.0));
  CHECK(longest.first >= before.first && longest.first <= 50);
  CHECK(longest.second <= 50);
}

/// In the first 50 steps all draft tokens are right, and then none is. There
/// are some trees until the tuner notices, and a trial at every 17th step. A
/// draft takes no time.
void noticing() {
  Tuner tuner(std::nullopt, /*width=*/1);
  int asked = 0;
  for (int step = 0; step < 100; ++step) {
    const auto shape = tuner.next([](int64_t, int64_t) { return 0.0; });
    const TokenTree tree = chain(shape.depth);
    asked += step >= 50 && shape.depth > 0 ? 1 : 0;
    tuner.observe(
        shape,
        tree,
        accepted(step < 50 ? shape.depth : 0),
        0.7 + 0.3 * static_cast<double>(tree.size()),
        /*draft_seconds=*/0.0);
  }
  CHECK(asked >= 2 && asked <= 9);
}

/// Even if trees are faster, steps without a tree are measured again, but
/// rarely.
void remeasuring() {
  Tuner tuner(std::nullopt, /*width=*/1);
  int singles = 0;
  int since = 0;
  for (int step = 0; step < 1000; ++step) {
    const auto shape = tuner.next([](int64_t, int64_t) { return 0.0; });
    since = shape.depth == 0 ? 0 : since + 1;
    CHECK(since <= 300);
    singles += shape.depth == 0 ? 1 : 0;
    tuner.observe(
        shape,
        chain(shape.depth),
        accepted(shape.depth),
        /*seconds=*/1.0,
        /*draft_seconds=*/0.0);
  }
  CHECK(singles <= 20);
}

void tuning() {
  // If verification costs almost nothing, trees are deep and wide.
  auto shape = settle(1.0, 0.001, {0.6, 0.3});
  CHECK(shape.depth >= 5 && shape.width >= 2);
  // If every token costs the same, no tree is faster.
  shape = settle(0.0, 1.0, {0.6, 0.1});
  CHECK_INT(shape.depth, 0);
  // If draft tokens are never right, there is no tree.
  shape = settle(1.0, 0.1, {});
  CHECK_INT(shape.depth, 0);
  // If the second candidate is never right, trees are chains.
  shape = settle(1.0, 0.1, {0.8});
  CHECK(shape.depth >= 2 && shape.width == 1);
  // If the draft costs as much as the model, there is no tree.
  shape = settle(1.0, 0.1, {0.5}, /*draft=*/1.0);
  CHECK_INT(shape.depth, 0);
  // A one-time cost, however large, changes nothing.
  for (const double once : {1.0, 100.0}) {
    shape = settle(1.0, 0.001, {0.6, 0.3}, 0.0, {}, {}, once);
    CHECK(shape.depth >= 5 && shape.width >= 2);
    shape = settle(0.0, 1.0, {0.6, 0.1}, 0.0, {}, {}, once);
    CHECK_INT(shape.depth, 0);
    shape = settle(1.0, 0.1, {0.8}, 0.0, {}, {}, once);
    CHECK(shape.depth >= 2 && shape.width == 1);
  }
  // A fixed depth stays.
  shape = settle(0.0, 1.0, {0.6}, 0.0, /*depth=*/4);
  CHECK_INT(shape.depth, 4);
  // A fixed value outside the tuner's range stays too.
  shape = settle(1.0, 0.001, {0.6, 0.3}, 0.0, std::nullopt, /*width=*/9);
  CHECK(shape.depth >= 3 && shape.width == 9);
  shape = settle(1.0, 0.001, {0.3, 0.3, 0.3}, 0.0, /*depth=*/7);
  CHECK(shape.depth == 7 && shape.width >= 3);
  shape = settle(1.0, 0.001, {0.3, 0.3, 0.3}, 0.0, /*depth=*/64);
  CHECK(shape.depth == 64 && shape.width >= 3);
  // The tuner begins with steps of one token, then chains.
  Tuner fresh(std::nullopt, std::nullopt);
  const auto free = [](int64_t, int64_t) { return 0.0; };
  bool had_tree = false;
  for (int step = 0; step < 6; ++step) {
    const auto first = fresh.next(free);
    CHECK(first.depth == 0 ? !had_tree : first.width == 1);
    CHECK(step > 0 || first.depth == 0);
    had_tree = first.depth > 0;
    fresh.observe(first, chain(first.depth), accepted(0), 1.0, 0.0);
  }
  CHECK(had_tree);
  Tuner fixed(2, 3);
  const auto both = fixed.next([](int64_t, int64_t) { return 0.0; });
  CHECK(both.depth == 2 && both.width == 3);
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  any_measurements();
  a_line();
  exceptions();
  tuning();
  patience();
  first_patience();
  noticing();
  remeasuring();
  return check_report();
}
