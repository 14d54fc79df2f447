// Steps through ExecuTorch's Module: a refused step leaves no trace, steps
// after a rewind give the results of a fresh cache, and chunks, formats and
// growth change no results.

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
      {"far over", text(32), run(9, 32), ETKV_ERROR_CAPACITY, "is 12"},
      {"over from below", text(13), run(0, 13), ETKV_ERROR_CAPACITY, "is 12"},
      {"token -1", {-1}, {9}, invalid, "-1"},
      {"token 320", {kVocabulary}, {9}, invalid, "320"},
      {"a large token", {1, kHuge}, {9, 10}, invalid, "9223372036854775807"},
      {"a bad token below", {1, kVocabulary}, {4, 5}, invalid, "320"},
  };
}

/// Runs 6 and 3 tokens, then the refused `steps`, then 3 more tokens.
Rows with_refusals(const std::vector<Refused>& steps, Ids ids) {
  Bound bound("llama-f32", 12);
  bound.at(0, slice(ids, 0, 6));
  bound.at(6, slice(ids, 6, 3));
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
      Bound bound("llama-f32", 12);
      bound.at(0, slice(ids, 0, 6));
      bound.at(6, slice(ids, 6, 3));
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
  Bound bound("llama-f32", 12);
  bound.at(0, slice(ids, 0, 6));
  bound.at(6, slice(ids, 6, 3));
  const CacheState before(bound.cache());

  Ids one = {1};
  Ids at = {9};
  std::vector<int32_t> narrow = {1, 9};
  std::vector<float> real = {9.0F};
  const auto id = from_blob(one.data(), {1, 1}, ScalarType::Long);
  const auto position = from_blob(at.data(), {1}, ScalarType::Long);
  const auto narrow_id = from_blob(narrow.data(), {1, 1}, ScalarType::Int);
  const auto narrow_at = from_blob(narrow.data() + 1, {1}, ScalarType::Int);
  const auto real_at = from_blob(real.data(), {1}, ScalarType::Float);
  const auto flat_id = from_blob(one.data(), {1}, ScalarType::Long);
  const auto deep_at = from_blob(at.data(), {1, 1}, ScalarType::Long);
  const auto none = from_blob(one.data(), {1, 0}, ScalarType::Long);
  const auto nowhere = from_blob(at.data(), {0}, ScalarType::Long);
  const std::vector<std::vector<EValue>> inputs = {
      {},
      {EValue(*id)},
      {EValue(*id), EValue(*position), EValue(*position)},
      {EValue(*narrow_id), EValue(*position)},
      {EValue(*id), EValue(*narrow_at)},
      {EValue(*id), EValue(*real_at)},
      {EValue(*flat_id), EValue(*position)},
      {EValue(*id), EValue(*deep_at)},
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
      bound.model.step(text(33), run(0, 33)),
      ETKV_ERROR_INVALID_ARGUMENT,
      "the step has 33 tokens, the program takes at most 32");
  CHECK(CacheState(bound.cache()) == before);
  CHECK(bound.at(9, slice(ids, 9, 3)) == wanted);
}

void full() {
  Bound bound("llama-f32", 6);
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

// ---- Rewinds -------------------------------------------------------------

void explicit_rewind() {
  const Ids ids = text(10);
  const Ids other = text(6, 2);
  for (const int32_t length : {0, 1, 4, 6}) {
    const auto kept = static_cast<size_t>(length);
    Bound fresh;
    if (kept > 0) {
      fresh.at(0, slice(ids, 0, kept));
    }
    const Rows wanted = fresh.at(length, other);

    // The rows that stay are written by a separate step, because a product of
    // more rows may round differently.
    Bound bound;
    if (kept > 0) {
      bound.at(0, slice(ids, 0, kept));
    }
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

void implicit_rewind() {
  const Ids ids = text(10);
  for (const size_t n : {1, 3, 6, 9}) {
    for (const int64_t start : {0, 1, 4, 9}) {
      const auto kept = static_cast<size_t>(start);
      const Ids other = text(static_cast<int64_t>(n), 2);
      Bound fresh;
      if (kept > 0) {
        fresh.at(0, slice(ids, 0, kept));
      }
      const Rows wanted = fresh.at(start, other);
      const Rows next = fresh.at(start + static_cast<int64_t>(n), {7});

      Bound bound;
      if (kept > 0) {
        bound.at(0, slice(ids, 0, kept));
      }
      bound.at(start, slice(ids, kept, 10 - kept));
      CHECK(bound.at(start, other) == wanted);
      CHECK_INT(*bound.cache().length(), start + static_cast<int64_t>(n));
      CHECK(bound.at(start + static_cast<int64_t>(n), {7}) == next);
    }
  }
}

// ---- Chunks and rows --------------------------------------------------------

void chunks() {
  const Ids ids = text(31);
  Bound whole;
  const Rows all = whole.at(0, ids);
  CHECK_INT(all.count, 31);
  CHECK_INT(all.vocabulary, kVocabulary);
  for (const size_t chunk : {1, 2, 7, 16, 30}) {
    Bound bound;
    Rows pieces{0, kVocabulary, {}};
    for (size_t i = 0; i < ids.size(); i += chunk) {
      const size_t n = std::min(chunk, ids.size() - i);
      const Rows rows = bound.at(static_cast<int64_t>(i), slice(ids, i, n));
      CHECK_INT(*bound.cache().length(), i + n);
      pieces.count += rows.count;
      pieces.values.insert(
          pieces.values.end(), rows.values.begin(), rows.values.end());
    }
    const double apart = distance(pieces, all);
    CHECK(apart < 1e-4);
    CHECK_INT(pieces.best(), all.best());
  }
  // One step of the program's maximum length.
  Bound most;
  CHECK_INT(most.at(0, text(kMaxTokens)).count, kMaxTokens);
}

void last_row() {
  const Ids ids = text(20);
  for (const char* name : {"llama-f32", "llama-bf16", "qwen3-f32"}) {
    const bool half = std::string(name) == "llama-bf16";
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

// ---- Storage ----------------------------------------------------------------

/// Returns the bytes of one slot of the tiny llama: 2 layers of 2 KV heads,
/// with keys and values of 16 elements.
constexpr uint64_t slot_bytes(uint64_t element) {
  return uint64_t{2} * 2 * (16 + 16) * element;
}

void growth() {
  for (const auto& [format, element] :
       {std::pair<const char*, uint64_t>{"f32", 4}, {"f16", 2}, {"bf16", 2}}) {
    const uint64_t slot = slot_bytes(element);
    Bound bound("llama-f32", 22, format);
    const Ids ids = text(22);
    CHECK_INT(bound.cache().memory()->allocated, 0);
    CHECK_INT(bound.cache().memory()->at_capacity, 22 * slot);
    for (uint64_t length = 1; length <= 22; ++length) {
      bound.at(static_cast<int64_t>(length) - 1, {ids[length - 1]});
      // Four slots, then doubled, but never more than the capacity.
      const uint64_t slots = length <= 4    ? 4
                             : length <= 8  ? 8
                             : length <= 16 ? 16
                                            : 22;
      const Memory memory = *bound.cache().memory();
      CHECK_INT(memory.allocated, slots * slot);
      CHECK_INT(memory.used, length * slot);
      CHECK_INT(memory.at_capacity, 22 * slot);
    }
    // One step can grow past several such sizes.
    must(bound.cache().clear(/*release=*/true));
    bound.at(0, slice(ids, 0, 9));
    CHECK_INT(bound.cache().memory()->allocated, 16 * slot);
  }
  // The first allocation does not exceed the capacity.
  Bound small("llama-f32", 3, "f32", 100);
  small.at(0, {1});
  CHECK_INT(small.cache().memory()->allocated, 3 * slot_bytes(4));
}

/// The positions at which a cache grows do not change its results.
void growth_changes_nothing() {
  const Ids ids = text(30);
  const auto answers = [&](int32_t min_chunk) {
    Bound bound("llama-f32", 64, "f32", min_chunk);
    std::vector<Rows> rows;
    rows.push_back(bound.at(0, slice(ids, 0, 3)));
    for (size_t i = 3; i < ids.size(); ++i) {
      rows.push_back(bound.at(static_cast<int64_t>(i), {ids[i]}));
    }
    return rows;
  };
  const auto wanted = answers(64);
  for (const int32_t min_chunk : {1, 3, 4, 29}) {
    CHECK(answers(min_chunk) == wanted);
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

/// MLX's count of bytes follows the cache's count.
void memory_is_freed() {
  const auto active = [] {
    etkv_mlx_memory memory{};
    memory.struct_size = sizeof(memory);
    REQUIRE(etkv_mlx_memory_read(&memory, nullptr) == ETKV_OK);
    return memory.active;
  };
  // 4,096 slots are more bytes than MLX rounds to.
  Bound bound("llama-f32", 4096, "f32", 4096);
  bound.at(0, text(8));
  must(bound.cache().clear(/*release=*/true));
  const uint64_t empty = active();
  bound.at(0, text(8));
  const uint64_t held = bound.cache().memory()->allocated;
  CHECK_INT(held, 4096 * slot_bytes(4));
  CHECK(active() >= empty + held && active() <= empty + held + held / 8);
  must(bound.cache().clear(/*release=*/true));
  CHECK(active() <= empty);
}

void formats() {
  const Ids ids = text(20);
  for (const char* name : {"llama-f32", "llama-bf16"}) {
    const auto answer = [&](const char* format) {
      Bound bound(name, 64, format);
      bound.at(0, slice(ids, 0, 12));
      return bound.at(12, slice(ids, 12, 8));
    };
    const bool half = std::string(name) == "llama-bf16";
    const Rows exact = answer(half ? "bf16" : "f32");
    const double f32 = distance(answer("f32"), exact);
    const double f16 = distance(answer("f16"), exact);
    const double bf16 = distance(answer("bf16"), exact);
    std::printf(
        "%s: distance of f32 %g, f16 %g, bf16 %g\n", name, f32, f16, bf16);
    // Storage in the program's dtype loses nothing. If the storage is wider,
    // products are computed in its dtype.
    CHECK(half ? f32 < 0.3 : f32 == 0.0);
    CHECK(f16 < (half ? 0.3 : 0.05));
    CHECK(bf16 < 0.3);
    CHECK(half ? bf16 == 0.0 : f16 < bf16);
    // Without a format, a cache stores the program's dtype.
    CHECK(answer("") == exact);
  }
}

void keys_and_values_apart() {
  Model model("llama-f32");
  auto config = make_config(model.params(), 8, "f32", 8);
  config.v_format = "f16";
  auto session = must(make_decode_session(backend(), config));
  must(model.load(session.key()));
  model.at(0, text(3));
  CHECK_INT(session->memory()->allocated, 8 * 2 * 2 * 16 * (4 + 2));
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
  explicit_rewind();
  implicit_rewind();
  chunks();
  last_row();
  growth();
  growth_changes_nothing();
  clearing();
  if (!on_cpu()) {
    memory_is_freed();
  }
  formats();
  keys_and_values_apart();
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
