// Trees of candidates in a program's steps. A node's results equal those of its
// chain run alone.

#include "tap.hpp"

namespace etkv::tests {
namespace {

using Parents = std::vector<int32_t>;

/// Returns the depth of each node below the sequence.
std::vector<int64_t> depths(const Parents& parents) {
  std::vector<int64_t> found;
  for (const int32_t parent : parents) {
    found.push_back(parent < 0 ? 0 : found[parent] + 1);
  }
  return found;
}

Ids positions(int64_t base, const Parents& parents, size_t first, size_t n) {
  Ids found;
  const auto all = depths(parents);
  for (size_t node = first; node < first + n; ++node) {
    found.push_back(base + all[node]);
  }
  return found;
}

/// Returns a text, followed by the ancestors of a node and the node.
Ids chain(
    const Ids& prefix,
    const Parents& parents,
    const Ids& ids,
    int32_t node) {
  Ids up;
  for (; node >= 0; node = parents[node]) {
    up.push_back(ids[node]);
  }
  Ids all = prefix;
  all.insert(all.end(), up.rbegin(), up.rend());
  return all;
}

/// Verifies all nodes in one step.
void whole(const Change& change) {
  const Ids prompt = text(9);
  const Parents parents = {-1, 0, 0, 1, -1, 4, 3};
  const Ids nodes = text(7, 5);
  On<TreeCache> on(change);
  on.model.at(0, prompt);
  must(on->propose(parents));
  CHECK_INT(must(on->tree_len()), 7);
  CHECK_INT(*on->length(), 9);
  const Rows rows = must(on.model.step(nodes, positions(9, parents, 0, 7)));
  for (int32_t node = 0; node < 7; ++node) {
    const Ids ids = chain(prompt, parents, nodes, node);
    CHECK(close(rows.row(node), alone(ids, change).last()));
  }
  // Candidates take cells, but are not part of the sequence yet.
  CHECK_INT(must(on->seq_len(0)), 9);
  CHECK(!*on->can_extend(64 - 9));

  must(on->commit({0, 1, 3}));
  CHECK_INT(must(on->tree_len()), 0);
  CHECK_INT(*on->length(), 12);
  CHECK_INT(must(on->seq_next(0)), 12);
  const Ids more = text(4, 8);
  const Rows wanted =
      alone(joined(chain(prompt, parents, nodes, 3), more), change);
  CHECK(close(on.model.at(12, more), wanted.tail(4)));
}

/// Drafts a tree level by level, one step per level.
void levels(const Change& change) {
  const Ids prompt = text(7);
  const Parents parents = {-1, -1, 0, 1, 1, 3, 2};
  const Ids nodes = text(7, 6);
  const size_t ends[] = {2, 5, 7};
  On<TreeCache> on(change);
  on.model.at(0, prompt);
  size_t first = 0;
  for (const size_t end : ends) {
    const size_t n = end - first;
    must(on->propose(parents.data() + first, n));
    const Rows rows = must(
        on.model.step(slice(nodes, first, n), positions(7, parents, first, n)));
    for (size_t i = 0; i < n; ++i) {
      const Ids ids =
          chain(prompt, parents, nodes, static_cast<int32_t>(first + i));
      CHECK(
          close(rows.row(static_cast<int64_t>(i)), alone(ids, change).last()));
    }
    first = end;
  }
  must(on->commit({1, 3, 5}));
  const Ids all = joined(chain(prompt, parents, nodes, 5), {17});
  CHECK(close(on.model.at(10, {17}), alone(all, change).last()));
}

/// If no node is accepted, the sequence is as before.
void rejected() {
  const Ids prompt = text(7);
  On<TreeCache> on;
  on.model.at(0, prompt);
  must(on->propose({-1, 0, 1}));
  must(on.model.step({1, 2, 3}, {7, 8, 9}));
  must(on->commit({}));
  CHECK_INT(*on->length(), 7);
  CHECK(close(on.model.at(7, {5}), alone(joined(prompt, {5})).last()));
  // A tree can also be removed before it has run.
  must(on->propose({-1, 0, 1}));
  must(on->commit({}));
  on.model.at(8, {6});
  CHECK_INT(*on->length(), 9);
}

/// Verifies trees after several sequences in one step.
void several() {
  const Ids a = text(6, 1);
  const Ids b = text(4, 2);
  On<TreeCache> on;
  must(on->begin_step({3, 3, 3, 3, 3, 3}));
  must(on.model.step(a, run(0, 6)));
  must(on->begin_step({8, 8, 8, 8}));
  must(on.model.step(b, run(0, 4)));
  const Parents one = {-1, 0, 0};
  const Parents two = {-1, -1};
  must(on->propose(two, 8));
  must(on->propose(one, 3));
  // Without a declaration, nodes run in order of their sequences.
  const Ids nodes = {10, 11, 12, 20, 21};
  const Rows rows = must(on.model.step(nodes, {6, 7, 7, 4, 4}));
  for (int32_t node = 0; node < 3; ++node) {
    CHECK(
        close(rows.row(node), alone(chain(a, one, {10, 11, 12}, node)).last()));
  }
  for (int32_t node = 0; node < 2; ++node) {
    CHECK(
        close(rows.row(3 + node), alone(chain(b, two, {20, 21}, node)).last()));
  }
  must(on->commit({0, 2}, 3));
  CHECK_INT(must(on->seq_len(3)), 8);
  must(on->commit({1}, 8));
  CHECK_INT(must(on->seq_len(8)), 5);
  CHECK_INT(*on->length(), 13);
}

void refusals() {
  const Ids prompt = text(6);
  On<TreeCache> on([](CacheConfig& config) { config.capacity = 10; });
  on.model.at(0, prompt);
  must(on->propose({-1, 0, 0}));
  const CacheState before(on.cache());
  CHECK_REFUSED(
      on.model.step({1, 2}, {6, 7}), ETKV_ERROR_INVALID_ARGUMENT, "3");
  CHECK_REFUSED(
      on.model.step({1, 2, 3}, {6, 7, 8}), ETKV_ERROR_POSITION, "got 8");
  CHECK_REFUSED(on->propose({-1}), ETKV_ERROR_STEP, "has not run");
  CHECK_REFUSED(on->seq_rm(0, 4), ETKV_ERROR_STEP, "tree");
  CHECK_REFUSED(on->commit({0}), ETKV_ERROR_INVALID_ARGUMENT, "0 nodes of");
  CHECK(CacheState(on.cache()) == before);
  must(on.model.step({1, 2, 3}, {6, 7, 7}));
  CHECK_REFUSED(
      on->propose({2, 3}), ETKV_ERROR_CAPACITY, "1 of 10 cells are free");
  CHECK_REFUSED(
      on->commit({0, 1, 2}), ETKV_ERROR_INVALID_ARGUMENT, "parent is 0");
  CHECK_REFUSED(on->commit({1}), ETKV_ERROR_INVALID_ARGUMENT, "node 1");
  CHECK_INT(must(on->tree_len()), 3);
  must(on->commit({0, 2}));
  CHECK_INT(*on->length(), 8);
}

/// A step of candidates that fails after its rows were written can be repeated.
void undone_steps() {
  const Ids prompt = text(6);
  const Parents parents = {-1, 0, 0};
  Tapped tapped(64, nullptr, TreeCache::kKind);
  auto cache = must(CacheRegistry::get<TreeCache>(tapped.key()));
  tapped.at(0, prompt);
  must(cache.propose(parents));
  CHECK_REFUSED(
      tapped.step({1, 2, 3}, {6, 7, 7}, no_output),
      ETKV_ERROR_SHAPE,
      "expected a tensor to write to");
  CHECK_INT(must(cache.tree_len()), 3);
  CHECK_REFUSED(cache.commit({0}), ETKV_ERROR_INVALID_ARGUMENT, "0 nodes of");
  const Rows rows = must(tapped.step({1, 2, 3}, {6, 7, 7}, nullptr));
  for (int32_t node = 0; node < 3; ++node) {
    CHECK(close(
        rows.row(node), alone(chain(prompt, parents, {1, 2, 3}, node)).last()));
  }
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  open_tap();
  const Change windows = [](etkv::CacheConfig& config) {
    config.layers[1].window = 4;
    config.layers[1].sinks = 1;
    config.max_step_tokens = 16;
  };
  for (const Change& change : {Change(), windows}) {
    whole(change);
    levels(change);
  }
  rejected();
  several();
  refusals();
  if (!on_cpu()) {
    undone_steps();
  }
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
