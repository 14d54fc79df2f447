// A step that fails after it began is rolled back, for every kind of wrong
// input and at every point of the step.

#include <algorithm>

#include "tap.hpp"

namespace etkv::tests {
namespace {

using ::executorch::aten::DimOrderType;
using ::executorch::aten::SizesType;
using ::executorch::aten::StridesType;
using ::executorch::aten::Tensor;
using ::executorch::aten::TensorImpl;
using ::executorch::aten::TensorShapeDynamism;
using ::executorch::extension::TensorPtr;

/// A way to make a step fail.
struct Fault {
  const char* what;
  etkv_status status;
  const char* words;
  Tamper tamper;
};

// The delegate's arguments, by their number of axes. The exporter may choose
// any order of inputs.
constexpr ssize_t kPositions = 1;
constexpr ssize_t kIds = 2;
constexpr ssize_t kLogits = 3;
constexpr size_t kArguments = 3;

/// Returns a tamper that replaces an argument by `value`, and keeps it alive.
Tamper replace(ssize_t axes, EValue value, TensorPtr keep = nullptr) {
  auto held = std::make_shared<EValue>(std::move(value));
  return [=](std::vector<EValue*>& arguments) {
    (void)keep;
    REQUIRE(arguments.size() == kArguments);
    const auto found = std::find_if(
        arguments.begin(), arguments.end(), [axes](const EValue* argument) {
          return argument->toTensor().dim() == axes;
        });
    REQUIRE(found != arguments.end());
    *found = held.get();
  };
}

Tamper replace(ssize_t axes, const TensorPtr& tensor) {
  return replace(axes, EValue(*tensor), tensor);
}

int64_t integers[kMaxTokens + 1];
int32_t narrow_integers[3];
float reals[kMaxTokens * kVocabulary];

/// Faults that are detected only after the step has written its rows: the
/// logits cannot be stored.
std::vector<Fault> output_faults() {
  const auto shape = ETKV_ERROR_SHAPE;
  const char* const unfit = "output 0: the host's tensor cannot have";
  const std::vector<SizesType> sizes = {1, kMaxTokens, kVocabulary};
  const auto fixed = ::executorch::extension::for_blob(reals, {1, 1, 2})
                         .dynamism(TensorShapeDynamism::STATIC)
                         .make_tensor_ptr();
  const auto small = from_blob(reals, {1, 1, kVocabulary - 1});
  const auto flat = from_blob(reals, {kMaxTokens, kVocabulary});
  const auto nowhere = from_blob(nullptr, sizes);
  const auto quantized = from_blob(reals, sizes, ScalarType::QInt8);
  return {
      {"a fixed output", shape, unfit, replace(kLogits, fixed)},
      {"a small output", shape, unfit, replace(kLogits, small)},
      {"another rank", shape, unfit, replace(kLogits, flat)},
      {"no memory", shape, "a tensor with memory", replace(kLogits, nowhere)},
      {"a dtype that MLX lacks",
       ETKV_ERROR_UNSUPPORTED,
       "dtype",
       replace(kLogits, quantized)},
      {"no tensor",
       shape,
       "expected a tensor to write to",
       replace(kLogits, EValue(int64_t{1}))},
  };
}

/// Returns every second of six ids, as a tensor with strides. ExecuTorch's
/// helpers make only contiguous tensors.
TensorImpl* strided_ids() {
  static SizesType sizes[] = {1, 3};
  static DimOrderType order[] = {0, 1};
  static StridesType strides[] = {6, 2};
  static TensorImpl ids(ScalarType::Long, 2, sizes, integers, order, strides);
  return &ids;
}

/// Faults in the arguments.
std::vector<Fault> argument_faults() {
  const auto invalid = ETKV_ERROR_INVALID_ARGUMENT;
  const auto dtype = ETKV_ERROR_DTYPE;
  const auto shape = ETKV_ERROR_SHAPE;
  const auto longs = [](std::vector<int32_t> sizes) {
    return from_blob(integers, std::move(sizes), ScalarType::Long);
  };
  return {
      {"one argument too few",
       invalid,
       "2 arguments",
       [](std::vector<EValue*>& arguments) { arguments.pop_back(); }},
      {"no arguments",
       invalid,
       "0 arguments",
       [](std::vector<EValue*>& arguments) { arguments.clear(); }},
      {"one argument too many",
       invalid,
       "4 arguments",
       [](std::vector<EValue*>& arguments) {
         arguments.push_back(arguments.back());
       }},
      {"int32 ids",
       dtype,
       "int32",
       replace(kIds, from_blob(narrow_integers, {1, 3}, ScalarType::Int))},
      {"float positions",
       dtype,
       "float32",
       replace(kPositions, from_blob(reals, {3}, ScalarType::Float))},
      {"a dtype that MLX lacks",
       dtype,
       "another dtype",
       replace(kIds, from_blob(reals, {1, 3}, ScalarType::QInt8))},
      {"flat ids", shape, "got [3]", replace(kIds, longs({3}))},
      {"deep ids", shape, "[1, 1, 3]", replace(kIds, longs({1, 1, 3}))},
      {"two sequences", shape, "[2, 3]", replace(kIds, longs({2, 3}))},
      {"no ids", shape, "[1, 0]", replace(kIds, longs({1, 0}))},
      {"too many ids", shape, "1 to 64", replace(kIds, longs({1, 65}))},
      {"no positions", shape, "[0]", replace(kPositions, longs({0}))},
      {"deep positions", shape, "[1, 3]", replace(kPositions, longs({1, 3}))},
      {"an integer for ids",
       invalid,
       "expected a tensor",
       replace(kIds, EValue(int64_t{3}))},
      {"a number for positions",
       invalid,
       "a tensor or an integer",
       replace(kPositions, EValue(3.0))},
      {"nothing for ids", invalid, "or an integer", replace(kIds, EValue())},
      {"ids without data",
       invalid,
       "with data",
       replace(kIds, from_blob(nullptr, {1, 3}, ScalarType::Long))},
      {"strided ids",
       invalid,
       "a contiguous input",
       replace(kIds, EValue(Tensor(strided_ids())))},
  };
}

/// A step that fails. It runs after steps of `rows` rows, at `position`, with
/// `n` tokens.
struct FailingStep {
  const char* what;
  std::vector<int64_t> rows;
  int64_t position;
  int64_t n;
};

std::vector<FailingStep> failing_steps() {
  return {
      {"the first step", {}, 0, 3},
      {"appends", {5}, 5, 3},
      {"appends and grows", {5}, 5, 6},
      {"grows twice", {3}, 3, 8},
      {"one token", {5}, 5, 1},
      {"goes back within", {3, 4}, 3, 2},
      {"goes back to the start", {3, 4}, 0, 3},
      {"goes back and past the end", {3, 4}, 5, 5},
      {"goes back, and grows", {3, 4}, 3, 8},
  };
}

void fill(Tapped& tapped, const FailingStep& step) {
  int64_t at = 0;
  for (const int64_t n : step.rows) {
    tapped.at(at, text(n, static_cast<uint32_t>(at) + 9));
    at += n;
  }
}

/// Logits that depend on the rows of a cache: of one more token, of the step
/// itself, and of a token after it.
struct Answers {
  Rows more;
  Rows again;
  Rows after;
};

Answers answers(Tapped& tapped, const FailingStep& step) {
  const auto length = static_cast<int64_t>(*tapped.cache().length());
  Answers answers;
  answers.more = tapped.at(length, {42});
  answers.again = tapped.at(step.position, text(step.n, 77));
  answers.after = tapped.at(step.position + step.n, {43});
  return answers;
}

bool operator==(const Answers& a, const Answers& b) {
  return a.more == b.more && a.again == b.again && a.after == b.after;
}

/// Checks one fault in one step.
void check_fault(
    const FailingStep& step,
    const Fault& fault,
    bool may_have_grown) {
  Tapped clean;
  fill(clean, step);
  const Answers wanted = answers(clean, step);

  Tapped tapped;
  fill(tapped, step);
  const CacheState before(tapped.cache());
  // Twice: the first failure must not affect the second.
  for (int i = 0; i < 2; ++i) {
    const auto result =
        tapped.step(text(step.n, 77), step.position, fault.tamper);
    CHECK_REFUSED(result, fault.status, fault.words);
    const CacheState after(tapped.cache());
    const bool same =
        after.length == before.length &&
        after.memory.used == before.memory.used &&
        (may_have_grown ? after.memory.allocated >= before.memory.allocated
                        : after.memory.allocated == before.memory.allocated);
    CHECK(same);
    if (result.ok() || !same) {
      std::printf("  %s, %s\n", step.what, fault.what);
    }
  }
  const bool same = answers(tapped, step) == wanted;
  CHECK(same);
  if (!same) {
    std::printf("  %s, %s\n", step.what, fault.what);
  }
}

void outputs_that_take_nothing() {
  for (const auto& step : failing_steps()) {
    for (const auto& fault : output_faults()) {
      // New slots of the step stay, without positions.
      check_fault(step, fault, /*may_have_grown=*/true);
    }
  }
}

void arguments_that_cannot_be() {
  const auto all = failing_steps();
  for (const auto& fault : argument_faults()) {
    check_fault(all[0], fault, /*may_have_grown=*/false);
    check_fault(all.back(), fault, /*may_have_grown=*/false);
  }
}

/// Makes every step fail in turn, on one cache.
void one_fault_after_the_other() {
  const Ids ids = text(40);
  std::vector<Rows> wanted;
  Tapped clean;
  for (size_t i = 0; i < ids.size(); i += 4) {
    wanted.push_back(clean.at(static_cast<int64_t>(i), slice(ids, i, 4)));
  }

  auto faults = output_faults();
  for (auto& fault : argument_faults()) {
    faults.push_back(std::move(fault));
  }
  Tapped tapped;
  size_t next = 0;
  for (size_t i = 0; i < ids.size(); i += 4) {
    for (int k = 0; k < 3; ++k) {
      const auto& fault = faults[next++ % faults.size()];
      const int64_t back = std::min<int64_t>(k * 3, static_cast<int64_t>(i));
      const auto refused =
          tapped.step(text(5, 5), static_cast<int64_t>(i) - back, fault.tamper);
      CHECK_REFUSED(refused, fault.status, fault.words);
    }
    CHECK_INT(*tapped.cache().length(), i);
    CHECK(
        tapped.at(static_cast<int64_t>(i), slice(ids, i, 4)) == wanted[i / 4]);
  }
}

/// A step over the capacity fails with the capacity error, even with a faulty
/// output. A step that ends exactly at the capacity fails with the error of its
/// faulty output.
void at_the_capacity() {
  const FailingStep step{"up to the capacity", {5}, 5, 5};
  Tapped clean(10);
  fill(clean, step);
  const Rows wanted = clean.at(5, text(5, 77));

  Tapped tapped(10);
  fill(tapped, step);
  for (const auto& fault : output_faults()) {
    CHECK_REFUSED(
        tapped.step(text(6, 77), 5, fault.tamper),
        ETKV_ERROR_CAPACITY,
        "capacity is 10");
    CHECK_REFUSED(
        tapped.step(text(5, 77), 5, fault.tamper), fault.status, fault.words);
  }
  CHECK(tapped.at(5, text(5, 77)) == wanted);
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  open_tap();
  outputs_that_take_nothing();
  arguments_that_cannot_be();
  one_fault_after_the_other();
  at_the_capacity();
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
