// Tests of the runners' `--check`: it detects an answer that differs from
// reference decoding or ends without a valid reason.

#include <atomic>
#include <cmath>
#include <csignal>
#include <functional>

#include "examples/common/interrupt.hpp"
#include "examples/common/reference_decoding.hpp"
#include "speculative.hpp"

namespace etkv::tests {
namespace {

using examples::Decoding;
using examples::FinishReason;

/// Returns the answer of reference decoding, of `n` ids.
Decoding answer(const Ids& prompt, size_t n, const Change& change = nullptr) {
  Decoding one{"the answer", prompt, static_cast<int64_t>(n)};
  one.stop = FinishReason::length;
  one.ids = reference_ids("tiny-llama-f32", prompt, n, change);
  return one;
}

void right_and_wrong() {
  auto model = open("tiny-llama-f32");
  const Decoding first = answer(text(7), 12);
  // The beginning that this prompt shares with the previous one is not read
  // again.
  const Decoding second = answer(joined(text(7), {3}), 12);
  must(check_answers(model, {first, second, first}));

  for (const size_t at : {size_t{0}, size_t{5}, size_t{11}}) {
    Decoding wrong = first;
    wrong.ids[at] = (wrong.ids[at] + 1) % kVocabulary;
    const auto refused = check_answers(model, {second, wrong});
    CHECK_REFUSED(
        refused,
        ETKV_ERROR_INTERNAL,
        ("check: the answer to \"the answer\" differs from reference decoding "
         "at token " +
         std::to_string(at))
            .c_str());
    CHECK_HAS(refused.error().message().c_str(), "whose logit is greater by");
  }
  Decoding other_prompt = first;
  other_prompt.prompt[0] += 1;
  CHECK(!check_answers(model, {other_prompt}).ok());
}

void ends() {
  auto model = open("tiny-llama-f32");
  Decoding one = answer(text(7), 12);
  Decoding cut = one;
  cut.ids.pop_back();
  CHECK_REFUSED(
      check_answers(model, {cut}),
      ETKV_ERROR_INTERNAL,
      "ended after 11 tokens for no reason");
  cut.stop = FinishReason::stop;
  CHECK_REFUSED(
      check_answers(model, {cut}), ETKV_ERROR_INTERNAL, "for no reason");

  // An eos token id must be the last id of its answer.
  model.end_with({one.ids.back()});
  REQUIRE(std::count(one.ids.begin(), one.ids.end(), one.ids.back()) == 1);
  CHECK_REFUSED(
      check_answers(model, {one}), ETKV_ERROR_INTERNAL, "for no reason");
  one.stop = FinishReason::stop;
  must(check_answers(model, {one}));
  one.ids.push_back(1);
  CHECK_REFUSED(
      check_answers(model, {one}),
      ETKV_ERROR_INTERNAL,
      "continues after its eos token id, number 12 of 13");
}

/// An answer that ended at a full cache must have filled it, unless other
/// sequences share the cache.
void full_caches() {
  Decoding one = answer(text(7), 12);
  one.max_tokens = 100;
  one.stop = FinishReason::capacity;
  // The last id is not in the cache.
  auto exact = open("tiny-llama-f32", 7 + 12 - 1);
  must(check_answers(exact, {one}));
  Decoding cut = one;
  cut.ids.pop_back();
  CHECK_REFUSED(
      check_answers(exact, {cut}),
      ETKV_ERROR_INTERNAL,
      "ended at a full cache, with 17 positions of 18 held");
  cut.ids.clear();
  CHECK(!check_answers(exact, {one, cut}).ok());
  // The positions of other sequences are unknown.
  auto shared = open("tiny-llama-f32", 100);
  CHECK(!check_answers(shared, {one}).ok());
  Decoding other = one;
  other.sequence = 1;
  must(check_answers(shared, {one, other}));
}

void no_answers() {
  auto model = open("tiny-llama-f32");
  CHECK_REFUSED(
      check_answers(model, {}),
      ETKV_ERROR_INTERNAL,
      "check: there is no answer to compare");
}

/// Checks an answer whose last id is wrong, and returns whether that was
/// detected. Calls `at_step` at the end of each step, with the number of
/// earlier steps.
bool finds_the_wrong_id(
    examples::Model& model,
    const Decoding& wrong,
    const std::function<void(int)>& at_step) {
  std::atomic<int> steps = 0;
  must(set_log_callback(
      "etkv::core=debug",
      [&](LogLevel, std::string_view, std::string_view message) {
        if (message.rfind("step{", 0) == 0 &&
            message.find("}: done") != std::string_view::npos &&
            message.find("grow{") == std::string_view::npos) {
          at_step(steps++);
        }
      }));
  examples::arm_interrupt();
  const bool found = !check_answers(model, {wrong}).ok();
  must(set_log_callback("", nullptr));
  examples::arm_interrupt();
  return found;
}

/// Ctrl-C in the middle of an answer.
void interrupts() {
  auto model = open("tiny-llama-f32");
  Decoding wrong = answer(text(7), 20);
  wrong.ids.back() = (wrong.ids.back() + 1) % kVocabulary;
  int n = 0;
  CHECK(finds_the_wrong_id(model, wrong, [&](int) { ++n; }));
  REQUIRE(n >= 20);
  int last = 0;
  const bool found = finds_the_wrong_id(model, wrong, [&](int step) {
    last = step;
    if (step == n / 2) {
      std::raise(SIGINT);
    }
  });
  CHECK(!found);
  CHECK(last == n / 2);
}

/// Reference decoding on a cache with a changed config, for an answer from such
/// a cache.
void windows() {
  auto model = open("tiny-llama-f32");
  const Decoding one = answer(text(7), 20, windows_of(8));
  REQUIRE(one.ids != answer(text(7), 20).ids);
  must(check_answers(model, {one, one}, windows_of(8)));
  CHECK(!check_answers(model, {one}).ok());
}

void margins() {
  using examples::allowed_ties;
  using examples::rounding_margin;
  // The margin is a multiple of the unit in the last place of the greatest
  // logit, in its dtype.
  CHECK(rounding_margin("bf16", "bf16", 4.0) == 4 * 0x1p-5);
  CHECK(rounding_margin("bf16", "bf16", 7.9) == 4 * 0x1p-5);
  CHECK(rounding_margin("f16", "f16", 4.0) == 4 * 0x1p-8);
  CHECK(rounding_margin("f32", "f32", 4.0) == 4 * 0x1p-21);
  CHECK(rounding_margin("bf16", "affine4g32", 4.0) == 16 * 0x1p-5);
  CHECK(rounding_margin("f32", "affine4g32", 20.0) < 1e-4);
  CHECK(rounding_margin("bf16", "bf16", 0.0) == 0.0);
  CHECK(rounding_margin("bf16", "bf16", HUGE_VAL) == 0.0);
  CHECK_INT(allowed_ties(0), 2);
  CHECK_INT(allowed_ties(40), 4);
  CHECK_INT(allowed_ties(1000), 52);
}

/// Returns an answer. At each step, its id has the smallest logit that is at
/// most `most(|best|)` below the best.
Decoding worst(const Ids& prompt, size_t n, double (*most)(double best)) {
  Bound on("tiny-llama-bf16", 64, "bf16");
  Decoding one{"the worst", prompt, static_cast<int64_t>(n)};
  one.stop = FinishReason::length;
  Rows rows = on.at(0, prompt).last();
  while (one.ids.size() < n) {
    const auto& row = rows.values;
    const auto best = static_cast<size_t>(rows.best());
    size_t id = best;
    for (size_t i = 0; i < row.size(); ++i) {
      if (row[i] < row[id] &&
          double{row[best]} - double{row[i]} <= most(std::abs(row[best]))) {
        id = i;
      }
    }
    one.ids.push_back(static_cast<int64_t>(id));
    rows = on.at(one.position(), {one.ids.back()}).last();
  }
  return one;
}

/// In bfloat16 many ids are close to the best. A wrong id is still refused.
void short_floats() {
  auto model = open("tiny-llama-bf16");
  const auto honest = worst(text(7), 40, [](double) { return -1.0; });
  must(check_answers(model, {honest, honest}));
  CHECK_REFUSED(
      check_answers(
          model, {worst(text(7), 40, [](double best) { return best / 8.0; })}),
      ETKV_ERROR_INTERNAL,
      "differs from reference decoding at token");
  // Each id is close to the best, but too many ids differ from it.
  CHECK_REFUSED(
      check_answers(
          model,
          {worst(
              text(7),
              40,
              [](double best) {
                return examples::rounding_margin("bf16", "bf16", best);
              })}),
      ETKV_ERROR_INTERNAL,
      "of 40 tokens trail reference decoding's choice; rounding explains 4");
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  right_and_wrong();
  ends();
  full_caches();
  no_answers();
  interrupts();
  windows();
  margins();
  short_floats();
  return check_report();
}
