// Steps through ExecuTorch's Module: a refused step leaves no trace, and steps
// after a rewind or a clear give the results of a fresh cache.

#include <limits>

#include "fixture.hpp"

namespace etkv::tests {
namespace {

// ---- Refused steps --------------------------------------------------------

struct Refused {
  const char* what;
  Ids ids;
  Ids positions;
  etkv_status status;
  const char* words;
};

/// Steps that a cache with 9 of 12 positions refuses.
std::vector<Refused> refused_steps() {
  constexpr int64_t kBig = std::numeric_limits<int32_t>::max();
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  const auto position = ETKV_ERROR_POSITION;
  const auto invalid = ETKV_ERROR_INVALID_ARGUMENT;
  return {
      {"a gap", {1}, {10}, position, "position 10"},
      {"a gap past the capacity", {1}, {13}, position, "position 13"},
      {"a large gap", {1}, {kBig}, position, "2147483647"},
      {"past 32 bits", {1}, {kBig + 1}, position, "2147483648"},
      {"9 in 32 bits", {1}, {(int64_t{1} << 32) + 9}, position, "4294967305"},
      {"the greatest", {1}, {kHuge}, position, "9223372036854775807"},
      {"negative", {1}, {-1}, position, "position -1"},
      {"negative later", {1, 2}, {9, -1}, position, "-1"},
      {"from below zero", {1, 2}, {-1, 0}, position, "position -1"},
      {"the least", {1}, {kMin}, position, "-9223372036854775808"},
      {"a hole", {1, 2}, {9, 11}, position, "11"},
      {"one twice", {1, 2}, {9, 9}, position, "got 9"},
      {"backwards", {1, 2}, {9, 8}, position, "got 8"},
      {"backwards, below", {1, 2, 3}, {4, 3, 2}, position, "got 3"},
      {"over capacity", text(4), run(9, 4), ETKV_ERROR_CAPACITY, "is 12"},
      {"far over", text(64), run(9, 64), ETKV_ERROR_CAPACITY, "is 12"},
      {"over from below", text(13), run(0, 13), ETKV_ERROR_CAPACITY, "is 12"},
      {"token -1", {-1}, {9}, invalid, "-1"},
      {"token 320", {kVocabulary}, {9}, invalid, "320"},
      {"a large token", {1, kHuge}, {9, 10}, invalid, "9223372036854775807"},
      {"a bad token below", {1, kVocabulary}, {4, 5}, invalid, "320"},
  };
}

/// Runs 6 and 3 tokens, then the refused `steps`, then 3 more tokens.
Rows with_refusals(const std::vector<Refused>& steps, Ids ids) {
  Bound bound("tiny-llama-f32", 12);
  bound.model.read(ids, 6, 0, 9);
  for (const auto& step : steps) {
    const CacheState before(bound.cache());
    const auto result = bound.model.step(step.ids, step.positions);
    if (result.ok() || !(CacheState(bound.cache()) == before)) {
      std::printf("%s:\n", step.what);
    }
    // On the CPU, ExecuTorch's kernel looks up tokens.
    const bool by_kernel =
        on_cpu() && step.status == ETKV_ERROR_INVALID_ARGUMENT;
    CHECK_REFUSED(
        result,
        by_kernel ? ETKV_ERROR_PROGRAM : step.status,
        by_kernel ? "forward" : step.words);
    CHECK(CacheState(bound.cache()) == before);
  }
  return bound.at(9, slice(ids, 9, 3));
}

void refused_steps_leave_no_trace() {
  const Ids ids = text(12);
  const Rows wanted = with_refusals({}, ids);
  const auto steps = refused_steps();
  for (const auto& step : steps) {
    CHECK(with_refusals({step}, ids) == wanted);
  }
  CHECK(with_refusals(steps, ids) == wanted);
}

/// Unequal numbers of ids and positions fail in the first layer, after the step
/// is open and before it overwrites rows.
void lengths_that_differ() {
  const Ids ids = text(12);
  const Rows wanted = with_refusals({}, ids);
  for (const int64_t start : {9, 4, 0}) {
    for (const auto& [n_ids, n_positions] :
         {std::pair<int64_t, int64_t>{3, 1}, {1, 3}, {2, 3}, {3, 2}}) {
      Bound bound("tiny-llama-f32", 12);
      bound.model.read(ids, 6, 0, 9);
      const CacheState before(bound.cache());
      const auto result =
          bound.model.step(text(n_ids, 3), run(start, n_positions));
      CHECK(!result.ok());
      CHECK(CacheState(bound.cache()) == before);
      CHECK(bound.at(9, slice(ids, 9, 3)) == wanted);
    }
  }
}

/// A step that ExecuTorch itself refuses does not reach the cache.
void inputs_that_executorch_refuses() {
  const Ids ids = text(12);
  const Rows wanted = with_refusals({}, ids);
  Bound bound("tiny-llama-f32", 12);
  bound.model.read(ids, 6, 0, 9);
  const CacheState before(bound.cache());

  Ids one = {1};
  Ids at = {9};
  std::vector<int32_t> narrow = {9};
  const auto id = from_blob(one.data(), {1, 1}, ScalarType::Long);
  const auto position = from_blob(at.data(), {1}, ScalarType::Long);
  const auto narrow_at = from_blob(narrow.data(), {1}, ScalarType::Int);
  const auto flat_id = from_blob(one.data(), {1}, ScalarType::Long);
  const auto none = from_blob(one.data(), {1, 0}, ScalarType::Long);
  const auto nowhere = from_blob(at.data(), {0}, ScalarType::Long);
  const std::vector<std::vector<EValue>> inputs = {
      {},
      {EValue(*id)},
      {EValue(*id), EValue(*position), EValue(*position)},
      {EValue(*id), EValue(*narrow_at)},
      {EValue(*flat_id), EValue(*position)},
      {EValue(*none), EValue(*nowhere)},
      {EValue(int64_t{1}), EValue(*position)},
      {EValue(*id), EValue(9.0)},
  };
  for (const auto& input : inputs) {
    // If inputs are missing, Module uses the inputs of an earlier run. So a
    // step may run here. It is rolled back.
    const auto ran = execute(bound.model.module(), "forward", input);
    if (ran.ok()) {
      CHECK(input.size() < 2);
      must(bound.cache().rewind(9));
    }
    CHECK(CacheState(bound.cache()) == before);
  }
  CHECK_REFUSED(
      bound.model.step(text(65), run(0, 65)),
      ETKV_ERROR_INVALID_ARGUMENT,
      "the step has 65 tokens, the program takes at most 64");
  CHECK(CacheState(bound.cache()) == before);
  CHECK(bound.at(9, slice(ids, 9, 3)) == wanted);
}

void full() {
  Bound bound("tiny-llama-f32", 6);
  const Ids ids = text(7);
  bound.at(0, slice(ids, 0, 5));
  CHECK(*bound.cache().can_extend() && !*bound.cache().can_extend(2));
  const Rows wanted = bound.at(5, {ids[5]});
  CHECK(!*bound.cache().can_extend() && *bound.cache().can_extend(0));
  CHECK_REFUSED(
      bound.model.step({ids[6]}, {6}), ETKV_ERROR_CAPACITY, "capacity is 6");
  CHECK_INT(*bound.cache().length(), 6);
  CHECK(
      bound.cache().memory()->allocated == bound.cache().memory()->at_capacity);
  // A full cache can still be rewound.
  CHECK(bound.at(5, {ids[5]}) == wanted);
  CHECK_INT(*bound.cache().length(), 6);
}

// ---- Rewinds, rows and clears -------------------------------------------

void rewinds() {
  const Ids ids = text(10);
  const Ids other = text(6, 2);
  for (const int32_t length : {0, 1, 4, 6}) {
    const auto kept = static_cast<size_t>(length);
    Bound fresh;
    fresh.model.read(ids, 10, 0, kept);
    const Rows wanted = fresh.at(length, other);

    // The rows that stay are written by a separate step, because a product of
    // more rows may round differently.
    Bound bound;
    bound.model.read(ids, 10, 0, kept);
    bound.at(length, slice(ids, kept, 10 - kept));
    CHECK_REFUSED(
        bound.cache().rewind(11), ETKV_ERROR_POSITION, "10 positions");
    CHECK_REFUSED(bound.cache().rewind(-1), ETKV_ERROR_POSITION, "-1");
    CHECK_INT(*bound.cache().length(), 10);
    const Memory before = *bound.cache().memory();
    must(bound.cache().rewind(length));
    CHECK_INT(*bound.cache().length(), length);
    // A rewind keeps slots for later tokens.
    CHECK_INT(bound.cache().memory()->allocated, before.allocated);
    CHECK_INT(bound.cache().memory()->used, before.used / 10 * kept);
    CHECK(bound.at(length, other) == wanted);
    CHECK_INT(*bound.cache().length(), length + 6);
  }
}

void last_row() {
  const Ids ids = text(20);
  for (const char* name :
       {"tiny-llama-f32", "tiny-llama-bf16", "tiny-qwen3-f32"}) {
    const bool half = std::string(name) == "tiny-llama-bf16";
    Bound all(name);
    Bound last(name, 64, "f32", 4, Logits::last);
    for (const auto& [start, n] :
         {std::pair<size_t, size_t>{0, 13}, {13, 1}, {14, 6}}) {
      const auto at = static_cast<int64_t>(start);
      const Rows wanted = all.at(at, slice(ids, start, n)).last();
      const Rows found = last.at(at, slice(ids, start, n));
      CHECK_INT(found.count, 1);
      CHECK(distance(found, wanted) < (half ? 0.1 : 1e-5));
      CHECK_INT(*last.cache().length(), start + n);
    }
  }
}

void clearing() {
  const Ids ids = text(12);
  Bound bound;
  const Rows first = bound.at(0, ids);
  const Memory full = *bound.cache().memory();

  must(bound.cache().clear());
  CHECK_INT(*bound.cache().length(), 0);
  CHECK_INT(bound.cache().memory()->allocated, full.allocated);
  CHECK_INT(bound.cache().memory()->used, 0);
  CHECK_REFUSED(
      bound.model.step({1}, {12}), ETKV_ERROR_POSITION, "the next is 0");
  CHECK(bound.at(0, ids) == first);

  must(bound.cache().clear(/*release=*/true));
  CHECK_INT(*bound.cache().length(), 0);
  CHECK_INT(bound.cache().memory()->allocated, 0);
  CHECK_INT(bound.cache().memory()->used, 0);
  CHECK_INT(bound.cache().memory()->at_capacity, full.at_capacity);
  CHECK(bound.at(0, ids) == first);
  CHECK(*bound.cache().memory() == full);
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  refused_steps_leave_no_trace();
  lengths_that_differ();
  inputs_that_executorch_refuses();
  full();
  rewinds();
  last_row();
  clearing();
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
